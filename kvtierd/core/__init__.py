"""The pure core: decides, never acts. No clock, socket, file, thread or event loop is known here."""
