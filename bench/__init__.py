"""Measurements: each module is a command that prints a table, or one JSON object with --json."""
