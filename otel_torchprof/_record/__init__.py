"""One recording: its sources started and stopped together, and what it recorded as one batch."""
