"""Columns: what was recorded, as numpy arrays with one name, type, unit and meaning each."""
