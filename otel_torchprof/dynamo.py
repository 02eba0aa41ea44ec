"""The names of ``torch._dynamo.profiler``."""

from ._profile.dynamo import (
    ProfileMetrics,
    Profiler,
    ProfileResult,
    fx_insert_profiling,
    print_missing,
    should_print_missing,
)

__all__ = [
    "ProfileMetrics",
    "ProfileResult",
    "Profiler",
    "fx_insert_profiling",
    "print_missing",
    "should_print_missing",
]
