"""Glue that engines import; never imported by the daemon."""
