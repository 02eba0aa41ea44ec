"""Reads Perfetto's own format with the classes of its proto files, as its trace processor does."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

if TYPE_CHECKING:
    from pathlib import Path


class Slice(NamedTuple):
    name: str
    category: str
    start: int
    end: int
    track: str
    depth: int
    arguments: dict
    flows: tuple
    ending_flows: tuple


class PerfettoTrace:
    """Slices by begin, and values of counters by their track."""

    def __init__(self, data: bytes) -> None:
        self.slices: list[Slice] = []
        self.counters: dict[str, list[tuple[int, int]]] = {}
        self.tracks: dict[int, str] = {}
        self.process = ""
        self._interned: dict[tuple[str, int], str] = {}
        self._open: dict[int, list[tuple]] = {}
        self._is_cleared = False
        for packet in Trace.FromString(data).packet:
            self._add(packet)
        assert not any(self._open.values())
        self.slices.sort(key=lambda each: (each.start, each.depth))

    def _add(self, packet) -> None:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            name = track.name or track.thread.thread_name
            self.tracks[track.uuid] = name
            self.process = track.process.process_name or self.process
        if packet.HasField("interned_data"):
            self._is_cleared |= bool(packet.sequence_flags & 1)
            assert self._is_cleared
            for kind in ("event_categories", "event_names", "debug_annotation_names", "debug_annotation_string_values"):
                for text in getattr(packet.interned_data, kind):
                    assert (kind, text.iid) not in self._interned
                    value = text.str.decode() if kind == "debug_annotation_string_values" else text.name
                    self._interned[kind, text.iid] = value
        if packet.HasField("track_event"):
            self._event(packet.timestamp, packet.track_event)

    def _event(self, time: int, event) -> None:
        stack = self._open.setdefault(event.track_uuid, [])
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            stack.append((time, event))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            start, begun = stack.pop()
            self.slices.append(
                Slice(
                    self._interned["event_names", begun.name_iid],
                    self._interned["event_categories", begun.category_iids[0]],
                    start,
                    time,
                    self.tracks[event.track_uuid],
                    len(stack),
                    {self._key(each): self._value(each) for each in begun.debug_annotations},
                    tuple(begun.flow_ids),
                    tuple(begun.terminating_flow_ids),
                )
            )
        else:
            self.counters.setdefault(self.tracks[event.track_uuid], []).append((time, event.counter_value))

    def _key(self, argument) -> str:
        return self._interned["debug_annotation_names", argument.name_iid]

    def _value(self, argument):
        if argument.dict_entries:
            return {self._key(each): self._value(each) for each in argument.dict_entries}
        kind = argument.WhichOneof("value")
        if kind == "string_value_iid":
            return self._interned["debug_annotation_string_values", argument.string_value_iid]
        return getattr(argument, kind)


def read(path: Path) -> PerfettoTrace:
    return PerfettoTrace(path.read_bytes())
