"""Kernels, copies and other work of devices as slices of a Chrome trace, with the arguments that Kineto gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_torchprof._columns.arrays import BLOCK, blocks

from .chrome_json import compact, microseconds, process_events, track_events, valid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_torchprof._columns.batch import Batch

_AFTER_PROCESSES = 5_000_000
"""Place of the first device among processes: as in Kineto's traces, behind all of them."""


def work_metadata(batch: Batch) -> str:
    """Names and places of devices and streams, each as a line that begins with a comma."""
    if batch.work is None:
        return ""
    pairs = sorted(set(zip(batch.work["device_index"].tolist(), batch.work["stream"].tolist(), strict=True)))
    lines = []
    for device in dict.fromkeys(device for device, _ in pairs):
        lines += process_events(device, "GPU", _AFTER_PROCESSES + device, f"GPU {device}")
    for device, stream in pairs:
        lines += track_events(device, stream, f"stream {stream}", stream)
    return "".join(f",\n{line}" for line in lines)


def work_pieces(batch: Batch, base_ns: int) -> Iterator[bytes]:
    """Encodes the work of a batch as lines of JSON, in pieces; nothing without any. Costs some 3 us per slice."""
    work, names = batch.work, batch.names
    if work is None:
        return
    texts = {
        number: compact(valid(names[number])) for name in ("name", "category") for number in set(work[name].tolist())
    }
    for block in blocks(len(work["start"])):
        columns = {name: column[block].tolist() for name, column in work.items()}
        lines = []
        for at in range(min(BLOCK, len(columns["start"]))):
            args = {
                "External id": columns["event"][at],
                "device": columns["device_index"][at],
                "stream": columns["stream"][at],
                "correlation": columns["correlation"][at],
                "bytes": columns["bytes"][at],
            }
            said = compact({name: value for name, value in args.items() if value >= 0})
            place = f'"pid":{args["device"]},"tid":{args["stream"]}'
            title = f'"cat":{texts[columns["category"][at]]},"name":{texts[columns["name"][at]]}'
            start, duration = microseconds(columns["start"][at] - base_ns), microseconds(columns["duration"][at])
            lines.append(f',\n{{"ph":"X",{title},{place},"ts":{start},"dur":{duration},"args":{said}}}')
        yield "".join(lines).encode()
