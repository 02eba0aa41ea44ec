"""The instrumentation: live recordings that become spans in the traces of a service."""
