"""Columns: recorded events as numpy arrays, each with a name, type, unit and meaning."""
