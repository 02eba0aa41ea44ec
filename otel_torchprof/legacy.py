"""The names of ``torch.autograd.profiler_legacy`` and of its C++ engine."""

from ._profile.events import EventList
from ._profile.legacy import RecordProfile, profile, write_profiler_events_to_stream
from ._profile.legacy_event import (
    VIEW_LIKE_OPERATORS,
    DeviceEvent,
    DeviceEvents,
    EventKind,
    LegacyEvent,
    OnDevice,
    ResolvedEvents,
    may_have_device_event,
)
from ._profile.legacy_state import (
    ProfilerConfig,
    ProfilerDisableOptions,
    ProfilerState,
    TLSLegacyProfilerGuard,
    add_event_list,
    disable_profiler_legacy,
    enable_profiler_legacy,
    wrap_propagate_state,
)

__all__ = [
    "VIEW_LIKE_OPERATORS",
    "DeviceEvent",
    "DeviceEvents",
    "EventKind",
    "EventList",
    "LegacyEvent",
    "OnDevice",
    "ProfilerConfig",
    "ProfilerDisableOptions",
    "ProfilerState",
    "RecordProfile",
    "ResolvedEvents",
    "TLSLegacyProfilerGuard",
    "add_event_list",
    "disable_profiler_legacy",
    "enable_profiler_legacy",
    "may_have_device_event",
    "profile",
    "wrap_propagate_state",
    "write_profiler_events_to_stream",
]
