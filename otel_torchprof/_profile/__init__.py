"""The profiler of a program: `profile`, its options and results."""
