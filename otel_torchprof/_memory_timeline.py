"""``export_memory_timeline``: how much memory was in use over time, in the formats of ``torch.profiler``.

Torch tells by category what the memory is used for; here all of it is of none (torch's value for what it cannot
classify). What was there before the profile is known from the moment on at which it is given back.
"""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._columns.schema import MemoryFlag
from ._export import file
from ._native.torch_library import installed_torch
from .errors import TorchProfError
from .function_event import DeviceType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Array = npt.NDArray[Any]

PREEXISTING, CREATE, INCREMENT_VERSION, DESTROY = 1, 2, 3, 4
"""What happened to a block: the values of torch's ``Action``."""

UNKNOWN = 7
"""Torch's index of the category of what it cannot classify; the seven before it are its categories."""

_LINES = 1 << 16
_PLOT_COLUMNS = 1000


class Timeline(NamedTuple):
    """What happened to the blocks of one device, in order of time."""

    time: npt.NDArray[np.int64]
    """Unix ns; -1 for what was there before."""
    action: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    """Size of the block."""


def export(prof: Any, path: str, device: str | None) -> None:
    """Writes the timeline of a device in the form that the suffix of ``path`` names, as torch does.

    ``.html``: a page with a plot; ``raw.json.gz``: a list of (time in ns, action, bytes, category); else ``[times in us,
    [sizes by category]]`` as JSON, gzipped for ``.gz``. ``device`` as in ``export_memory_timeline``.

    Raises:
        TorchProfError: memory was not recorded.
        ValueError: a device that torch does not know.
        ExportError: the file cannot be written.
    """
    if prof.memory is None:
        raise TorchProfError("the profile has recorded no memory: use profile(profile_memory=True)")
    chosen = device or _default_device(prof.use_device)
    timeline = timeline_of(_of_device(prof.memory, chosen))
    if path.endswith(".html"):
        file.write(path, [_page(timeline, chosen).encode()])
    elif path.endswith("raw.json.gz"):
        file.write(path, _raw(timeline))
    else:
        file.write(path, _sizes_by_category(timeline))


def timeline_of(memory: Mapping[str, Array]) -> Timeline:
    """Brings allocations and what is given back into torch's form.

    A block is known by its address: allocated where one lives already, it is the next version of that; given back where
    none lives, it was there before.
    """
    in_time = np.argsort(memory["time"], kind="stable")
    size, time = memory["bytes"][in_time], memory["time"][in_time]
    by_block = np.lexsort((memory["address"][in_time], memory["device_index"][in_time]))
    address, index = memory["address"][in_time][by_block], memory["device_index"][in_time][by_block]
    lives = np.zeros(len(size), dtype=bool)
    same = (address[1:] == address[:-1]) & (index[1:] == index[:-1])
    lives[by_block[1:]] = same & (size[by_block][:-1] > 0)
    before = (size <= 0) & ~lives
    action = np.where(size > 0, np.where(lives, INCREMENT_VERSION, CREATE), DESTROY)
    action = np.concatenate((np.full(int(before.sum()), PREEXISTING), action))
    time = np.concatenate((np.full(int(before.sum()), -1), time))
    size = np.abs(np.concatenate((size[before], size)))
    order = np.lexsort((action, time))
    return Timeline(time[order], action[order], size[order])


def _of_device(memory: Mapping[str, Array], device: str) -> dict[str, Array]:
    name, _, index = device.partition(":")
    chosen = memory["device_type"] == _device_type(name)
    chosen &= (memory["flags"] & MemoryFlag.OUT_OF_MEMORY) == 0
    if index:
        chosen &= np.maximum(memory["device_index"], 0) == int(index)
    return {column: values[chosen] for column, values in memory.items()}


def _device_type(name: str) -> int:
    known = {kind.name.lower(): int(kind) for kind in DeviceType}
    known["privateuseone"] = int(DeviceType.PrivateUse1)
    torch = installed_torch()
    if torch is not None:
        known.setdefault(torch._C._get_privateuse1_backend_name(), int(DeviceType.PrivateUse1))  # noqa: SLF001 - no other way
    if name not in known:
        raise ValueError(f"device={name!r}: allowed are {', '.join(sorted(known))}, each with or without :index")
    return known[name]


def _default_device(used: str | None) -> str:
    if used is not None and used != "cuda":
        return f"{used}:0"
    torch = installed_torch()
    return "cuda:0" if torch is not None and torch.cuda.is_available() else "cpu"


def _raw(timeline: Timeline) -> Iterator[bytes]:
    """One entry per block and action; a next version is two, the old one gone and the new one there."""
    again = 1 + (timeline.action == INCREMENT_VERSION)
    time, action, size = (np.repeat(column, again) for column in timeline)
    gone = action == DESTROY
    gone[(np.cumsum(again) - again)[timeline.action == INCREMENT_VERSION]] = True
    size[gone] *= -1
    return _lines([time, action, size, np.full(len(time), UNKNOWN)])


def _sizes_by_category(timeline: Timeline) -> Iterator[bytes]:
    time, used = in_use(timeline)
    yield b"[" + json.dumps(time.tolist()).encode() + b", "
    nothing = np.zeros(len(time), dtype=np.int64)
    yield from _lines([*[nothing] * (UNKNOWN + 1), used])
    yield b"]"


def _lines(columns: list[Array]) -> Iterator[bytes]:
    """A JSON list of rows, in pieces."""
    yield b"["
    for begin in range(0, len(columns[0]), _LINES):
        rows = np.stack([column[begin : begin + _LINES] for column in columns], axis=1)
        yield (b", " if begin else b"") + json.dumps(rows.tolist())[1:-1].encode()
    yield b"]"


def in_use(timeline: Timeline) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Bytes in use after each microsecond in which something changed; what was there before stands at the first."""
    change = np.where(timeline.action == DESTROY, -timeline.bytes, timeline.bytes)
    change[timeline.action == INCREMENT_VERSION] = 0
    time = np.where(timeline.time < 0, -1, timeline.time // 1000)
    last = np.flatnonzero(np.append(time[1:] != time[:-1], True)) if len(time) else np.empty(0, dtype=np.int64)
    used, time = np.cumsum(change)[last], time[last]
    if len(time) > 1 and time[0] < 0:
        time[0] = time[1]
    return time, used


# ---- the page ----

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Memory timeline of {device}</title></head>
<body style="font-family: sans-serif">
<h1 style="font-size: 1.2em">Memory timeline of {device}</h1>
<p>Most in use: {most:.3f} MiB, {blocks} blocks allocated, {before:.3f} MiB there before and given back.</p>
<svg viewBox="-90 -10 1110 470" width="100%" role="img" aria-label="bytes in use over time">
<path d="{path}" fill="grey" fill-opacity="0.7" stroke="none"/>
<path d="M0 0V400H1000" fill="none" stroke="black"/>
{marks}
<text x="500" y="445" text-anchor="middle">Time (ms)</text>
<text x="-70" y="200" text-anchor="middle" transform="rotate(-90 -70 200)">Memory (MiB)</text>
</svg>
</body></html>
"""


def _page(timeline: Timeline, device: str) -> str:
    time, used = in_use(timeline)
    begin, span = (int(time[0]), max(int(time[-1] - time[0]), 1)) if len(time) else (0, 1)
    most = int(used.max(initial=0))
    return _PAGE.format(
        device=html.escape(device),
        most=most / 2**20,
        blocks=int((timeline.action == CREATE).sum()),
        before=int(timeline.bytes[timeline.action == PREEXISTING].sum()) / 2**20,
        path=_path((time - begin) / span, used / max(most, 1)),
        marks="\n".join(_marks(span / 1000, most / 2**20)),
    )


def _path(across: Array, up: Array) -> str:
    """A staircase; of the changes within one column of the picture the largest is drawn."""
    column = (across * _PLOT_COLUMNS).astype(np.int64)
    first = np.flatnonzero(np.append(True, column[1:] != column[:-1])) if len(column) else np.empty(0, dtype=np.int64)
    heights = np.maximum.reduceat(up, first) if len(first) else up
    steps = [f"H{x}V{400 - 400 * y:.1f}" for x, y in zip(column[first].tolist(), heights.tolist(), strict=True)]
    return f"M0 400{''.join(steps)}H{_PLOT_COLUMNS}V400Z"


def _marks(width: float, height: float) -> Iterator[str]:
    for part in range(5):
        x, y = 250 * part, 400 - 100 * part
        yield f'<text x="{x}" y="420" text-anchor="middle">{width * part / 4:.2f}</text>'
        yield f'<text x="-8" y="{y + 4}" text-anchor="end">{height * part / 4:.2f}</text>'
