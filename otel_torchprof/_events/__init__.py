"""Events and averages as torch's profiler gives them: lists, tables, objects."""
