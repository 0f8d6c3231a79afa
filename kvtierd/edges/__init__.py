"""All I/O: pool, engine socket, movers, backends, publisher, admin port. The only rooms that act."""
