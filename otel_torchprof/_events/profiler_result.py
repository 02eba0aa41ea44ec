"""What ``prof.profiler.kineto_results`` is: torch's ``_ProfilerResult``, made of a recording of ours."""

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
    """A recording for those who read torch's: all that happened, as a tree and as a list. Thread-safe; needs torch."""

    def __init__(self, batch: Batch, start_ns: int, save: Callable[[str], None], *, with_flops: bool) -> None:
        self._nodes = Nodes(batch, with_flops=with_flops)
        self._tree = EventTree(self._nodes)
        self._start_ns = start_ns
        self._save = save

    def experimental_event_tree(self) -> list[ProfilerEvent]:
        """What nothing is around, by start; all else is below it.

        Each event is one object for as long as this lives, made when it is first looked at: some 20 us each with its name and fields.
        """
        return self._tree.children(-1)

    def events(self) -> list[KinetoEvent]:
        """Everything, by start; some microseconds each."""
        return [KinetoEvent(Node(self._nodes, position)) for position in range(len(self._nodes.tree))]

    def trace_activities(self) -> list[TraceActivity]:
        """The same with their arguments in a Chrome trace, which is made for it; 30 to 60 us each."""
        arguments = arguments_of(self._nodes.batch)
        events = zip(self.events(), self._nodes.tree.row.tolist(), strict=True)
        return [TraceActivity(event, arguments[row]) for event, row in events]

    def trace_start_ns(self) -> int:
        """When the recording began, Unix time."""
        return self._start_ns

    def save(self, path: str) -> None:
        """As ``export_chrome_trace``."""
        self._save(path)
