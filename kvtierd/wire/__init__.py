"""The pure wire rooms: engine protocol v1 and the KV event stream. No socket and no clock is known here."""
