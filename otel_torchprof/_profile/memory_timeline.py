"""``export_memory_timeline``: how much memory was in use over time and what for, in the formats of ``torch.profiler``."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof import config
from otel_torchprof._columns.distinct import distinct_values
from otel_torchprof._columns.schema import MEMORY_COLUMNS, Kind
from otel_torchprof._events.function_event import DeviceType
from otel_torchprof._export import file
from otel_torchprof._native.torch_library import installed_torch
from otel_torchprof._tree.input_words import InputKept, has_inputs
from otel_torchprof._tree.memory_blocks import device_number
from otel_torchprof._tree.memory_categories import memory_changes
from otel_torchprof._tree.memory_changes import Action, Category
from otel_torchprof.errors import TorchProfError

from .memory_page import page
from .memory_schemas import written_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._tree.memory_changes import Changes

Array = npt.NDArray[Any]

_logger = logging.getLogger("otel_torchprof")

_LINES = 1 << 16


def check(prof: Any) -> None:
    """Whether a profile has recorded all that tells what memory is used for.

    Raises:
        ValueError: it has not; with torch's text.
    """
    missing = [f"{name}=True" for name in ("record_shapes", "profile_memory", "with_stack") if not getattr(prof, name)]
    if missing:
        raise ValueError(f"{', '.join(missing)} required for memory profiling.")


def export(batch: Batch, path: str, device: str | None, used_device: str | None = None) -> None:
    """Writes the timeline of a device in the form that the suffix of ``path`` names, as torch does.

    ``.html``: a page with a plot; ``raw.json.gz``: a list of (time in ns, action, bytes, category); else ``[times in us,
    [sizes by category]]`` as JSON, gzipped for ``.gz``; the first size of each is always 0, as in torch. ``device`` as in
    ``export_memory_timeline``; ``used_device``: the one that the profile was for.

    Raises:
        TorchProfError: memory was not recorded.
        ValueError: a device that torch does not know.
        ExportError: the file cannot be written.
    """
    notes = []
    if batch.memory is None and not config.ENABLED.read():
        # A program that is switched off from outside continues as if it were not.
        batch = replace(batch, memory={column.name: np.empty(0, column.dtype) for column in MEMORY_COLUMNS})
        notes.append(f"nothing was recorded: {config.ENABLED} is false")
    if batch.memory is None:
        raise TorchProfError("the profile has recorded no memory: use profile(profile_memory=True)")
    path, chosen = os.fspath(path), str(device or _default_device(used_device))
    name, _, index = chosen.partition(":")
    _device_type(name)
    if index and not index.isdecimal():
        raise ValueError(f"device={chosen!r}: allowed are numbers after the colon, as in {name}:0")
    changes = memory_changes(batch, written_inputs, _type_or_none)
    devices = changes.device
    changes = changes.chosen(_is_of(devices, chosen))
    notes = notes or _why_unknown(batch)
    if not len(changes.time) and len(devices):
        notes.append(f"nothing was allocated or freed on {chosen}; memory was used on: {_names(devices)}")
    for note in notes:
        _logger.warning("memory timeline: %s", note)
    if path.endswith(".html"):
        file.write(path, [page(changes, *in_use(changes), chosen, notes).encode()])
    elif path.endswith("raw.json.gz"):
        file.write(path, _raw(changes))
    else:
        file.write(path, _sizes_by_category(changes))


def _why_unknown(batch: Batch) -> list[str]:
    """What a recording lacks that tells what memory is used for."""
    notes = []
    if not has_inputs(batch) or not batch.kept & InputKept.STORAGES:
        notes.append("no inputs of operators were recorded, so it is not known what memory was used for")
    elif not (batch["kind"] == Kind.FRAME).any():
        notes.append(
            "no calls were recorded, so parameters, and gradients and optimizer state that were there before, are told by "
            "the flow of data alone"
        )
    return notes


def _names(devices: Array) -> str:
    """Devices as ``export_memory_timeline`` takes them, from their numbers."""
    found = []
    for number in distinct_values(devices).tolist():
        kind, index = divmod(number, device_number(1, 0))
        name = next((known.name.lower() for known in DeviceType if known == kind), f"device {kind}")
        found.append(f"{name}:{index}" if kind else name)
    return ", ".join(found)


def _device_type(name: str) -> int:
    known = {kind.name.lower(): int(kind) for kind in DeviceType}
    known["privateuseone"] = int(DeviceType.PrivateUse1)
    torch = installed_torch()
    if torch is not None:
        known.setdefault(torch._C._get_privateuse1_backend_name(), int(DeviceType.PrivateUse1))  # noqa: SLF001 - no other way
    if name not in known:
        raise ValueError(f"device={name!r}: allowed are {', '.join(sorted(known))}, each with or without :index")
    return known[name]


def _type_or_none(name: str) -> int:
    """As :func:`_device_type`; -1 for what was a device when it was recorded and is none any more."""
    try:
        return _device_type(name)
    except ValueError:
        return -1


def _is_of(numbers: Array, device: str) -> npt.NDArray[np.bool_]:
    """Which numbers of devices a name means, with or without an index."""
    name, _, index = device.partition(":")
    kind = _device_type(name)
    if index:
        return np.asarray(numbers == device_number(kind, int(index)))
    return np.asarray(numbers // device_number(1, 0) == kind)


def _default_device(used: str | None) -> str:
    if used is not None and used != "cuda":
        return f"{used}:0"
    torch = installed_torch()
    return "cuda:0" if torch is not None and torch.cuda.is_available() else "cpu"


def _raw(changes: Changes) -> Iterator[bytes]:
    """One entry per block and action; a next version is two: the old one destroyed and the new one created."""
    again = 1 + (changes.action == Action.INCREMENT_VERSION)
    time, action, size, category, later, _ = (np.repeat(column, again) for column in changes)
    gone = action == Action.DESTROY
    first = (np.cumsum(again) - again)[changes.action == Action.INCREMENT_VERSION]
    gone[first] = True
    category[first + 1] = later[first + 1]
    size[gone] *= -1
    return _lines([time, action, size, category])


def _sizes_by_category(changes: Changes) -> Iterator[bytes]:
    time, used = in_use(changes)
    yield b"[" + json.dumps(time.tolist()).encode() + b", "
    yield from _lines([np.zeros(len(time), dtype=np.int64), *used.T])
    yield b"]"


def _lines(columns: list[Array]) -> Iterator[bytes]:
    """A JSON list of rows, in pieces."""
    yield b"["
    for begin in range(0, len(columns[0]), _LINES):
        rows = np.stack([column[begin : begin + _LINES] for column in columns], axis=1)
        yield (b", " if begin else b"") + json.dumps(rows.tolist())[1:-1].encode()
    yield b"]"


def in_use(changes: Changes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Each microsecond in which something changed, and the bytes in use after it by category: rows of 8.

    What was there before stands at the first.
    """
    is_rise = changes.action == Action.INCREMENT_VERSION
    is_gone = changes.action == Action.DESTROY
    time = np.where(changes.time < 0, -1, changes.time // 1000)
    last = np.flatnonzero(np.append(time[1:] != time[:-1], True)) if len(time) else np.empty(0, dtype=np.int64)
    used = np.empty((len(last), len(Category)), dtype=np.int64)
    for category in Category:
        change = np.where(changes.later == category, np.where(is_gone, -changes.bytes, changes.bytes), 0)
        change -= np.where(is_rise & (changes.category == category), changes.bytes, 0)
        used[:, category] = np.cumsum(change)[last]
    time = time[last]
    if len(time) > 1 and time[0] < 0:
        time[0] = time[1]
    return time, used
