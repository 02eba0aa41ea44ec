"""Trace files, read event by event in bounded memory: Chrome JSON, this package's and torch's, and OTLP; aligned, and merged. Nothing in them is trusted."""
