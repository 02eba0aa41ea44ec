"""What ``kineto_results.trace_activities()`` gives: what torch's writer of Chrome traces in Python reads (torch 2.13)."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from otel_torchprof._encode import chrome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_torchprof._columns.batch import Batch

    from .kineto_event import KinetoEvent

_ON_TRACKS = frozenset(("cpu_op", "user_annotation", "python_function"))


class TraceActivity:
    """``_ITraceActivity``: an event with the arguments that it has in a Chrome trace. Immutable."""

    def __init__(self, event: KinetoEvent, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self.name = event.name
        self.type = event.activity_type
        self.timestamp = event.start_ns
        self.duration = event.duration_ns
        self.resource_id = event.device_resource_id
        self.correlation_id = event.correlation_id
        self.linked_correlation_id = event.linked_correlation_id
        self.flow_id = event.flow_id
        self.flow_type = event.flow_type
        self.flow_start = event.flow_start

    def device_id(self) -> int:
        """The process: nothing that a device did is an event of its own."""
        return os.getpid()

    def linked_activity(self) -> None:
        """None: it is no kernel of another event's."""
        return

    def metadata_json(self) -> str:
        """Its arguments as JSON, without the braces."""
        return json.dumps({key: value for key, value in self._arguments.items() if key != "External id"})[1:-1]


def arguments_of(batch: Batch) -> Sequence[Mapping[str, Any]]:
    """What each event, and behind these all memory, has as ``args`` in the Chrome trace."""
    written = json.loads(b"".join(chrome.encode(batch)))["traceEvents"]
    events = [event for event in written if event.get("cat") in _ON_TRACKS and event["ph"] in "Xb"]
    memory = [event for event in written if event.get("cat") == "cpu_instant_event"]
    return [event.get("args", {}) for event in events + memory]
