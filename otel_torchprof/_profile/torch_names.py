"""Names that torch's profiler modules have and that are torch's own here too: what they do needs no profiler of ours."""

from __future__ import annotations

from typing import Any

_NAMES = frozenset(("ExecutionTraceObserver", "RecordScope", "_ExperimentalConfig", "itt"))


def __getattr__(name: str) -> Any:
    """For modules that take it over as theirs: imports torch when such a name is asked for, and not before.

    Raises:
        AttributeError: there is no such name, as for every other module.
        ImportError: torch is not installed.
    """
    if name not in _NAMES:
        raise AttributeError(f"otel_torchprof has no attribute {name!r}")
    import torch.profiler

    return getattr(torch.profiler, name)
