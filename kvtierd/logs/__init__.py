"""What the daemon writes to its log: named events with fields, as JSON lines or for people."""
