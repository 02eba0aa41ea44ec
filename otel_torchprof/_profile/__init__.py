"""`profile` and its results, and torch's types and names for them: events, averages, Kineto objects, the legacy profiler, dynamo's."""
