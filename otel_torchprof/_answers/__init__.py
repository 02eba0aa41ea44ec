"""Analyses: why training is slow, what differs between two recordings, which rank hung. Rules, verdicts and their evidence."""
