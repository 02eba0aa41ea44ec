"""Events as torch's simple Chrome JSON: a list of slices that knows no processes, no metadata and no time of day."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ._columns.schema import MEMORY_KIND
from ._encode.chrome_json import PIECE_SIZE, valid
from ._model.tree import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ._recorded_events import EventSource

_NS_PER_US = 1000
_PROCESS = '"pid": "CPU functions", '
_NO_ARGUMENTS = '"args": {}}'


def slices_of_columns(source: EventSource) -> Iterator[str]:
    """The slices of recorded events, many at a time; makes none of the events. Memory is none of them."""
    batch, rows = source.batch, source.view.rows
    rows = rows[batch["kind"][rows] != MEMORY_KIND]  # has no name in a trace, as in torch
    used = np.unique(batch["name"][rows]).tolist()
    heads = {name: f'{{"name": {_quoted(batch.names[name])}, "ph": "X", "ts": ' for name in used}
    tids = [thread.torch_tid or thread.ident for thread in batch.threads]
    tails = [f', "tid": {tid}, {_PROCESS}{_NO_ARGUMENTS}' for tid in tids]
    for begin in range(0, len(rows), BLOCK):
        block = rows[begin : begin + BLOCK]
        starts, ends = ((batch[column][block] - source.origin_ns) / _NS_PER_US for column in ("start", "end"))
        columns = (batch["name"][block], starts, ends - starts, batch["thread"][block])
        lines = zip(*(column.tolist() for column in columns), strict=True)
        yield ", ".join([f'{heads[name]}{at}, "dur": {long}{tails[thread]}' for name, at, long, thread in lines])


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
            yield (
                f'{{"name": {_quoted(event.trace_name)}, "ph": "s", "ts": {times.start}, "tid": {tid}, {_PROCESS}'
                f'"id": {arrows}, "cat": "cpu_to_{use_device or "cuda"}", {_NO_ARGUMENTS}'
            )
            arrows += 1


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
