"""Chrome JSON of spans, export after export: a document whose array of events grows.

The document is that of :mod:`.chrome`, with the resource of the first span as its ``otherData``. It is closed after each
export: no viewer loads it otherwise, whereas Perfetto leaves aside what may follow a whole document.

A span is a complete event. Its arguments are ``trace_id``, ``span_id``, ``parent_id``, ``attributes``, ``links`` and what
is out of the ordinary: ``kind`` other than internal, ``status`` and ``status_description``, ``trace_state``,
``dropped_attributes``, ``dropped_events``, ``dropped_links``. Its events are instants on its track. A link between two
spans of one export is an arrow too, if what it points to began first.
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

from .chrome_columns import Columns
from .chrome_json import BASE_GRID_NS, compact, metadata_event, process_events
from .chrome_objects import Objects, json_value
from .chrome_tracks import Tracks
from .process_resource import of_this_process
from .spans import SpanList

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

CLOSING = b"\n]}\n"
"""What ends the document."""

# So many weeks before the first span: a job that began weeks ago ends in this file too, and viewers drop negative times.
# A double still tells nanoseconds apart.
_WEEKS_BEFORE = 8


class ChromeSpans:
    """Encodes one export after another into one trace file. For one thread at a time.

    What was drawn before decides where the next span has room, and names are told once. Memory grows with threads and
    with spans that overlap in time, not with spans.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.pid = os.getpid() if pid is None else pid
        self._tracks = Tracks(self.pid)
        self._resources: list[Resource] = []
        self._resources_reported = 1
        self._base: int | None = None
        self._arrows = 0

    def encode(self, spans: Sequence[ReadableSpan], *, begin: bool) -> Iterator[bytes]:
        """The events of these spans, in pieces of about 1 MiB; with ``begin`` a document, without its closing.

        A SpanList is encoded from its columns, natively and without the GIL. Of other spans the arguments are made first, one by one, at
        some 20 µs each.
        Raises ValueError for a table that does not fit together, MemoryError.
        """
        if len(spans) == 0:
            return
        if begin:
            self.report_again()
        for resource in [spans.resource] if isinstance(spans, SpanList) else [span.resource for span in spans]:
            self._note_resource(resource)
        rows = Columns(spans) if isinstance(spans, SpanList) else Objects(spans)
        order, tids = self._tracks.place(rows.outlines)
        arrows = rows.lay_out(order, tids)
        base = self._settled_base(int(rows.outlines.start.min()))
        yield self._news(begin).encode()
        self._arrows += arrows
        yield from rows.pieces(self.pid, base, self._arrows - arrows)

    def report_again(self) -> None:
        """What the last export wrote is lost: names of tracks and the like are told once more."""
        self._tracks.report_again()
        self._resources_reported = 1

    def copied(self) -> ChromeSpans:
        """One that continues from here as this one would, for spans that may not fit."""
        other = copy.copy(self)
        other._tracks, other._resources = copy.deepcopy(self._tracks), list(self._resources)  # noqa: SLF001 - its own kind
        return other

    def _settled_base(self, first_start: int) -> int:
        """The time that "ts" counts from, Unix ns; the first export decides."""
        if self._base is None:
            self._base = (first_start // BASE_GRID_NS - _WEEKS_BEFORE) * BASE_GRID_NS
        return self._base

    def _note_resource(self, resource: Resource) -> None:
        resource = of_this_process(resource)
        if not any(resource is known or resource == known for known in self._resources):
            self._resources.append(resource)

    def _news(self, begin: bool) -> str:
        """What the reader has not been told yet."""
        labels = [self._label(resource) for resource in self._resources[self._resources_reported :]]
        self._resources_reported = max(1, len(self._resources))
        news = "".join(f",\n{event}" for event in (*labels, *self._tracks.news()))
        return self._opening() + news if begin else news

    def _opening(self) -> str:
        """The document up to its first events, which all others follow after a comma: the process and its name."""
        resource = json_value(self._resources[0].attributes)
        fields = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._base,
            "otherData": {"resource": resource},
        }
        process = ",\n".join(process_events(self.pid, _service(resource), self.pid))
        return f'{compact(fields)[:-1]},\n"traceEvents":[\n{process}'

    def _label(self, resource: Resource) -> str:
        """The process has its name from the first resource; another provider's is a label."""
        attributes = json_value(resource.attributes)
        return metadata_event("process_labels", self.pid, 0, labels=_service(attributes), resource=attributes)


def _service(resource: dict[str, Any]) -> str:
    return str(resource.get("service.name", "python"))
