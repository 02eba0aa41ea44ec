"""OpenTelemetry metrics: of operators, of the recorder, of GPUs."""
