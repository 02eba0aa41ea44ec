"""Reads the events of trace files, in any of the formats."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from otel_torchprof.errors import TorchProfError

from .attribute_keys import JOB, MERGED_RANKS, OTHER, RANK
from .event_columns import WANTED, events_of_trace, process_names
from .records import BASE_TIME, DESCRIPTIONS, MEMBERS, NO_SPAN, MalformedError, object_of, objects
from .trace_columns import read_columns
from .trace_events import joined
from .values import key_of, process_of, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from otel_torchprof._export.byte_stream import ByteStream

    from .trace_columns import TraceColumns
    from .trace_events import TraceEvents

_WITH_RANK = frozenset((JOB, OTHER))
"""Members of a Chrome trace's document that contain its rank."""
_MOST_NAMED = 5
_LONGEST_MEMBER = 40


def read_events(
    paths: Sequence[str],
    watch: Callable[[str, ByteStream], None] = lambda _path, _stream: None,
    attributes: Sequence[str] = WANTED,
) -> TraceEvents:
    """Reads the files of one recording. Costs some 2 us per event.

    Args:
        paths: paths of the files, in their order.
        watch: gets each file when it is open, to display how much has been read.
        attributes: the attributes of spans to read.

    Raises:
        TorchProfError: nothing of a file could be read; names the file, the place and the way out.
    """
    return joined([EventReading(path, partial(watch, path), attributes).events for path in paths])


class EventReading:
    """A file that was read: its events, and what it says of its processes. Memory is at most half of what is free.

    Args:
        path: path of the file.
        watch: gets the open file, to display how much has been read.
        attributes: the attributes of spans to read.

    Raises:
        TorchProfError: nothing of it could be read; names the file, the place and the way out.
    """

    def __init__(self, path: str, watch: Callable[[ByteStream], None], attributes: Sequence[str] = WANTED) -> None:
        trace = read_columns(path, watch=watch, attributes=attributes)
        self.is_chrome = not trace.resources
        self.members = trace.members
        """Members of the document of a Chrome trace."""
        self.process_names = process_names(trace)
        """Process, kind and text of each name or label of a process in a Chrome trace."""
        self.resources = {process_of(attributes): attributes for attributes in trace.resources}
        """The attributes of OTLP resources, by process."""
        events = self.events = events_of_trace(path, trace)
        events.ranks, unread = self._ranks(trace)
        events.left_out += _members_left_out(trace)
        if unread:
            events.problems.append(f"{path!r}: not counted: {len(unread):,}; the first: {unread[0]}")
        if not len(events):
            raise TorchProfError("; ".join(events.problems) or NO_SPAN.format(path))

    def _ranks(self, trace: TraceColumns) -> tuple[dict[Hashable, int], list[str]]:
        """The ranks by process, of None that of the whole file; and why members or resources cannot be read."""
        ranks: dict[Hashable, int] = {}
        unread: list[str] = []
        said = [(name, ranks_of_member(name, value)) for name, value in trace.members.items()]
        said += [("a resource", _ranks_of_resource(*resource)) for resource in self.resources.items()]
        for what, found in said:
            try:
                ranks.update(found)
            except MalformedError as error:  # noqa: PERF203 - one that cannot be read does not stop the others
                unread.append(f"{what} cannot be read ({error})")
        unread += (f"{name} cannot be read ({reason})" for name, reason in trace.unread.items() if name in MEMBERS)
        return ranks, unread


def _members_left_out(trace: TraceColumns) -> Counter[str]:
    """The number of members of a Chrome trace's document that are not used, with the names of the first."""
    names = [
        repr(name[:_LONGEST_MEMBER]) for name in (*trace.members, *trace.unread) if name not in MEMBERS | DESCRIPTIONS
    ]
    return Counter({f"members of the document, as {', '.join(names[:_MOST_NAMED])}": len(names)} if names else {})


def ranks_of_member(name: str, value: Any) -> Iterator[tuple[Hashable, int]]:
    """Yields the rank in torch's ``distributedInfo`` or this package's ``otherData``, and the ranks of a merged trace.

    Raises MalformedError, also for a time base that is no number.
    """
    if name == BASE_TIME:
        whole(value, name)
    member = object_of(value, name) if name in _WITH_RANK else {}
    resource = member.get("resource")
    rank = resource.get(RANK) if isinstance(resource, dict) else member.get("rank")
    if rank is not None:
        yield None, whole(rank, "rank")
    for process in objects(member, MERGED_RANKS):
        if process.get("rank") is not None:
            yield key_of(process.get("pid")), whole(process["rank"], "rank")


def _ranks_of_resource(process: Hashable, attributes: dict[str, Any]) -> Iterator[tuple[Hashable, int]]:
    if attributes.get(RANK) is not None:
        yield process, whole(attributes[RANK], RANK)
