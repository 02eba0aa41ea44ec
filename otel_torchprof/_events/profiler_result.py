"""``prof.profiler.kineto_results``: torch's ``_ProfilerResult``, made from a recording of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kineto_event import KinetoEvent
from .profiler_events import EventTree
from .recorded_nodes import Node, Nodes
from .trace_activity import TraceActivity, arguments_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.batch import Batch

    from .profiler_events import ProfilerEvent


class ProfilerResult:
    """A recording in torch's form, as a tree and as a list. Thread-safe; needs torch."""

    def __init__(self, batch: Batch, start_ns: int, save: Callable[[str], None], *, with_flops: bool) -> None:
        self._nodes = Nodes(batch, with_flops=with_flops)
        self._tree = EventTree(self._nodes)
        self._start_ns = start_ns
        self._save = save

    def experimental_event_tree(self) -> list[ProfilerEvent]:
        """Returns the top-level events, by start, with all others below them.

        Each event is one object during the life of this one, created on access: about 20 us each with its name and
        fields.
        """
        return self._tree.children(-1)

    def events(self) -> list[KinetoEvent]:
        """Returns all events by start; some microseconds each."""
        return [KinetoEvent(Node(self._nodes, position)) for position in range(len(self._nodes.tree))]

    def trace_activities(self) -> list[TraceActivity]:
        """Returns all events with their arguments in a Chrome trace, which is created for it; 30 to 60 us each."""
        arguments = arguments_of(self._nodes.batch)
        events = zip(self.events(), self._nodes.tree.row.tolist(), strict=True)
        return [TraceActivity(event, arguments[row]) for event, row in events]

    def trace_start_ns(self) -> int:
        """Returns the start of the recording, Unix ns."""
        return self._start_ns

    def save(self, path: str) -> None:
        """Writes the trace, as ``export_chrome_trace``."""
        self._save(path)
