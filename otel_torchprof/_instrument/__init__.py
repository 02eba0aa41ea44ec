"""The instrumentation: recordings that become spans in the traces of a service, and metrics of operators, the recorder and GPUs."""
