"""Torch's older and smaller profilers: the legacy engine, dynamo's."""
