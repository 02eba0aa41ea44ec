"""Torch's older and smaller profilers: the legacy profiler and dynamo's."""
