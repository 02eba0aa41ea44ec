"""Events as torch's simple Chrome JSON: a list of slices that knows no processes, no metadata and no time of day."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.arrays import BLOCK, distinct_values
from otel_torchprof._columns.schema import MEMORY_KIND
from otel_torchprof._encode.chrome_json import valid
from otel_torchprof._native.encoders import PIECE_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .recorded_events import EventSource

_NS_PER_US = 1000
_PROCESS = '"pid": "CPU functions", '
_NO_ARGUMENTS = '"args": {}}'


def slices_of_columns(source: EventSource) -> Iterator[str]:
    """The slices of recorded events, many at a time; makes none of the events. Memory is none of them."""
    batch, times = source.batch, source.info.device_time("device_time_total")
    chosen = np.flatnonzero(batch["kind"][source.view.rows] != MEMORY_KIND)  # which has no name in a trace, as in torch
    rows = source.view.rows[chosen]
    launches = np.zeros(len(rows), dtype=np.bool_) if times is None else times[chosen] != 0
    used = distinct_values(batch["name"][rows]).tolist()
    heads = {name: f'{{"name": {_quoted(batch.names[name])}, "ph": "X", "ts": ' for name in used}
    tids = [thread.number for thread in batch.threads]
    arrows = 0
    tails = [f', "tid": {tid}, {_PROCESS}{_NO_ARGUMENTS}' for tid in tids]
    for begin in range(0, len(rows), BLOCK):
        block = rows[begin : begin + BLOCK]
        starts, ends = ((batch[column][block] - source.origin_ns) / _NS_PER_US for column in ("start", "end"))
        columns = (batch["name"][block], starts, ends - starts, batch["thread"][block])
        lines = zip(*(column.tolist() for column in columns), strict=True)
        texts = [f'{heads[name]}{at}, "dur": {long}{tails[thread]}' for name, at, long, thread in lines]
        for place in np.flatnonzero(launches[begin : begin + BLOCK]).tolist():
            row, at = block[place], starts.item(place)
            texts[place] += ", " + _arrow(
                _quoted(batch.names[batch["name"][row]]), at, tids[batch["thread"][row]], arrows, source.use_device
            )
            arrows += 1
        yield ", ".join(texts)


def slices_of(events: Iterable[Any], use_device: str | None) -> Iterator[str]:
    """The slices of events that are objects, each followed by the begins of the arrows to its kernels."""
    arrows = 0
    for event in events:
        if event.trace_name is None:
            continue
        times, tid = event.time_range, event.thread
        place = json.dumps(f" node_id:{event.node_id}, thread_id:{tid} ") if event.is_remote else tid
        yield (
            f'{{"name": {_quoted(event.trace_name)}, "ph": "X", "ts": {times.start}, "dur": {times.elapsed_us()}, '
            f'"tid": {place}, {_PROCESS}{_NO_ARGUMENTS}'
        )
        for _ in event.kernels:
            yield _arrow(_quoted(event.trace_name), times.start, tid, arrows, use_device)
            arrows += 1


def _arrow(name: str, start: float, tid: int, number: int, use_device: str | None) -> str:
    """The begin of an arrow to what a device did; ``name`` is JSON."""
    return (
        f'{{"name": {name}, "ph": "s", "ts": {start}, "tid": {tid}, {_PROCESS}'
        f'"id": {number}, "cat": "cpu_to_{use_device or "cuda"}", {_NO_ARGUMENTS}'
    )


def joined(slices: Iterable[str]) -> Iterator[bytes]:
    """The document, in pieces of about 1 MiB."""
    piece, size, before = ["["], 1, ""
    for text in slices:
        piece += before, text
        before = ", "
        size += len(text)
        if size >= PIECE_SIZE:
            yield "".join(piece).encode()
            piece, size = [], 0
    yield "".join([*piece, "]"]).encode()


@functools.lru_cache(maxsize=4096)
def _quoted(name: str) -> str:
    return json.dumps(valid(name), ensure_ascii=False)
