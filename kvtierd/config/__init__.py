"""The tier file: its schema and how it is loaded."""
