"""Prometheus metrics: declared as data, read from the daemon's figures when somebody scrapes."""
