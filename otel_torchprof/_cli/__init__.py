"""The command `otel-torchprof`."""
