"""``export_memory_timeline``: memory in use over time by category, in the formats of ``torch.profiler``."""

from __future__ import annotations

import html
import json
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof import config
from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.schema import MEMORY_COLUMNS, Kind
from otel_torchprof._export import file
from otel_torchprof._model.inputs import InputKept, InputKind, has_inputs
from otel_torchprof._model.memory import Category, MemoryAction, device_number
from otel_torchprof._model.memory_categories import memory_changes
from otel_torchprof._native.torch_library import installed_torch
from otel_torchprof.errors import TorchProfError

from .function_event import DeviceType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._model.memory import Changes

Array = npt.NDArray[Any]

# ---- The memory timeline as a self-contained HTML page ----


_COLUMNS = 1000
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))

_COLOURS = {
    Category.PARAMETER: "darkgreen",
    Category.OPTIMIZER_STATE: "goldenrod",
    Category.INPUT: "black",
    Category.TEMPORARY: "mediumpurple",
    Category.ACTIVATION: "red",
    Category.GRADIENT: "mediumblue",
    Category.AUTOGRAD_DETAIL: "royalblue",
    Category.UNKNOWN: "grey",
}
"""Torch's colours, in the order in which the categories are stacked, from below."""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Memory timeline of {device}</title></head>
<body style="font-family: sans-serif">
<h1 style="font-size: 1.2em">Memory timeline of {device}</h1>
<p>Most in use: {most} {unit}, {blocks} blocks allocated, {before} {unit} there before.</p>
{notes}<svg viewBox="-90 -10 1270 470" width="100%" role="img" aria-label="bytes in use over time, by category">
{areas}
<path d="M0 0V400H1000" fill="none" stroke="black"/>
{marks}
<text x="500" y="445" text-anchor="middle">Time (ms)</text>
<text x="-70" y="200" text-anchor="middle" transform="rotate(-90 -70 200)">Memory ({unit})</text>
{legend}
</svg>
</body></html>
"""


def page(changes: Changes, time: Array, used: Array, device: str, notes: Sequence[str]) -> str:
    """The memory timeline of a device as an HTML page.

    Args:
        changes: changes of memory on the device.
        time: rising times, us.
        used: bytes in use at each time (rows) by category (columns).
        device: name of the device.
        notes: sentences above the plot.
    """
    begin, span = (int(time[0]), max(int(time[-1] - time[0]), 1)) if len(time) else (0, 1)
    most = int(used.sum(axis=1).max(initial=0))
    unit, size = next(((name, size) for name, size in _UNITS if most >= size), _UNITS[-1])
    return _PAGE.format(
        device=html.escape(device),
        most=f"{most / size:.3f}",
        unit=unit,
        blocks=int((changes.action == MemoryAction.CREATE).sum()),
        before=f"{int(changes.bytes[changes.action == MemoryAction.PREEXISTING].sum()) / size:.3f}",
        notes="".join(f"<p>{html.escape(note)}</p>\n" for note in notes),
        areas="\n".join(_areas((time - begin) / span, used / max(most, 1))),
        marks="\n".join(_marks(span / 1000, most / size)),
        legend="\n".join(_legend(used, unit, size)),
    )


def _areas(across: Array, up: npt.NDArray[np.float64]) -> Iterator[str]:
    """Yields the stacked areas of the categories as SVG paths; within one column of pixels, the highest total is drawn."""
    column = (across * _COLUMNS).astype(np.int64)
    first = np.flatnonzero(np.append(True, column[1:] != column[:-1])) if len(column) else np.empty(0, dtype=np.int64)
    highest = _highest(up.sum(axis=1), first)
    edges = np.concatenate((np.zeros((len(first), 1)), np.cumsum(up[highest], axis=1)), axis=1)
    x = np.append(column[first], _COLUMNS).tolist()
    for category, colour in _COLOURS.items():
        lower, upper = (400 - 400 * edges[:, category + side] for side in (0, 1))
        if (lower > upper).any():
            yield f'<path d="{_outline(x, lower, upper)}" fill="{colour}" fill-opacity="0.7" stroke="none"/>'


def _highest(total: Array, first: Array) -> npt.NDArray[np.int64]:
    """For runs of values that begin at the indices ``first``, the index of the highest value of each."""
    if not len(first):
        return first
    run = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(total))))
    order = np.lexsort((total, run))
    last: npt.NDArray[np.int64] = order[np.append(first[1:], len(total)) - 1]
    return last


def _outline(x: list[int], lower: Array, upper: Array) -> str:
    forth = [f"V{y:.1f}H{end}" for y, end in zip(upper.tolist(), x[1:], strict=True)]
    back = [f"V{y:.1f}H{begin}" for y, begin in zip(lower[::-1].tolist(), x[-2::-1], strict=True)]
    return f"M{x[0]} {lower[0]:.1f}{''.join(forth)}{''.join(back)}Z"


def _marks(width: float, height: float) -> Iterator[str]:
    for part in range(5):
        x, y = 250 * part, 400 - 100 * part
        yield f'<text x="{x}" y="420" text-anchor="middle">{width * part / 4:.2f}</text>'
        yield f'<text x="-8" y="{y + 4}" text-anchor="end">{height * part / 4:.2f}</text>'


def _legend(used: npt.NDArray[np.int64], unit: str, size: int) -> Iterator[str]:
    """Yields a line for each category in use, the topmost first, with its maximum."""
    displayed = [category for category in reversed(_COLOURS) if used[:, category].any()]
    for line, category in enumerate(displayed):
        y, most = 10 + 34 * line, int(used[:, category].max()) / size
        yield f'<rect x="1015" y="{y}" width="14" height="14" fill="{_COLOURS[category]}" fill-opacity="0.7"/>'
        yield f'<text x="1035" y="{y + 12}" font-size="13">{category.name}<tspan x="1035" dy="15" font-size="11">'
        yield f"most {most:.3f} {unit}</tspan></text>"


# ---- Inputs that an operator writes to, by torch's schemas ----
# A recording has an operator's name and inputs, not its overload; so all overloads that the inputs fit are considered.


def written_inputs(name: str, kinds: Sequence[InputKind]) -> tuple[bool, ...] | None:
    """For each input, whether an operator of that name and such inputs may write to it; None if no such operator is known.

    Inputs fit a schema by the rules of torch's memory profiler: an input that it does not record fits an optional argument
    and any type that it does not know. Imports torch. Costs some 100 us for the first call with a name.
    """
    fitting = [arguments for arguments in _schemas(name) if _fit(kinds, arguments)]
    if not fitting:
        return None
    return tuple(any(is_written for _, is_written in overloads) for overloads in zip(*fitting, strict=True))


_known: dict[str, tuple[tuple[tuple[Any, bool], ...], ...]] = {}
"""Cached schemas by operator. Unknown operators are not cached: they may be registered later."""


def _schemas(name: str) -> tuple[tuple[tuple[Any, bool], ...], ...]:
    """For each overload of an operator, the type of every argument and whether it is written to."""
    if name in _known:
        return _known[name]
    torch = installed_torch()
    if torch is None or "::" not in name:
        return ()
    try:
        torch_schemas = torch._C._jit_get_schemas_for_operator(name)  # noqa: SLF001 - no other way
    except RuntimeError:  # a name that no operator can have
        return ()
    schemas = tuple(
        tuple((argument.type, getattr(argument.alias_info, "is_write", False)) for argument in schema.arguments)
        for schema in torch_schemas
    )
    if schemas:
        _known[name] = schemas
    return schemas


def _fit(kinds: Sequence[InputKind], arguments: Sequence[tuple[Any, bool]]) -> bool:
    return len(kinds) == len(arguments) and all(
        _fits(kind, requested) for kind, (requested, _) in zip(kinds, arguments, strict=True)
    )


_NOTHING = frozenset((InputKind.OTHER, InputKind.SCALAR_LIST, InputKind.STRING))
"""Kinds of inputs that torch's profiler records as None."""

_SCALARS = {
    "IntType": (InputKind.INT, InputKind.BOOL),
    "BoolType": (InputKind.BOOL,),
    "FloatType": (InputKind.DOUBLE,),
    "ComplexType": (InputKind.COMPLEX,),
    "NumberType": (InputKind.INT, InputKind.BOOL, InputKind.DOUBLE, InputKind.COMPLEX),
}


def _fits(kind: InputKind, requested: Any) -> bool:
    name = type(requested).__name__
    if name == "OptionalType":
        return kind in _NOTHING or _fits(kind, requested.getElementType())
    if name == "AnyType":
        return True
    if name == "TensorType":
        return kind is InputKind.TENSOR
    if name == "ListType" and type(requested.getElementType()).__name__ == "TensorType":
        return kind is InputKind.TENSOR_LIST
    return kind in _SCALARS.get(name, _NOTHING)


_logger = logging.getLogger("otel_torchprof")

_LINES = 1 << 16


def check(prof: Any) -> None:
    """Checks that a profile has recorded all that the categories of memory need.

    Raises:
        ValueError: an option is missing; with torch's text.
    """
    missing = [f"{name}=True" for name in ("record_shapes", "profile_memory", "with_stack") if not getattr(prof, name)]
    if missing:
        raise ValueError(f"{', '.join(missing)} required for memory profiling.")


def export(batch: Batch, path: str, device: str | None, used_device: str | None = None) -> None:
    """Writes the timeline of a device in the form that the suffix of ``path`` names, as torch does.

    ``.html``: a page with a plot; ``raw.json.gz``: a list of (time in ns, action, bytes, category); else ``[times in us,
    [sizes by category]]`` as JSON, gzipped for ``.gz``; the first size of each is always 0, as in torch.

    Args:
        batch: the recording.
        path: path of the file.
        device: as for ``export_memory_timeline``.
        used_device: device of the profile.

    Raises:
        TorchProfError: memory was not recorded.
        ValueError: torch does not know the device.
        ExportError: the file cannot be written.
    """
    notes = []
    if batch.memory is None and not config.ENABLED.read():
        # Disabled by the environment: the program continues, with an empty timeline.
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


def known_categories(batch: Batch) -> Changes | None:
    """The changes of memory with their categories, if the recording has what these need; times in ns. Costs some microseconds per change."""
    return None if _why_unknown(batch) else memory_changes(batch, written_inputs, _type_or_none)


def _why_unknown(batch: Batch) -> list[str]:
    """Notes on missing data of a recording, without which categories are unknown."""
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
    """Names of devices as ``export_memory_timeline`` takes them, from their numbers."""
    names = []
    for number in distinct_values(devices).tolist():
        kind, index = divmod(number, device_number(1, 0))
        name = next((known.name.lower() for known in DeviceType if known == kind), f"device {kind}")
        names.append(f"{name}:{index}" if kind else name)
    return ", ".join(names)


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
    """As :func:`_device_type`; -1 for a device that was known only when it was recorded."""
    try:
        return _device_type(name)
    except ValueError:
        return -1


def _is_of(numbers: Array, device: str) -> npt.NDArray[np.bool_]:
    """A mask of the device numbers that a device name matches; a name without an index matches all its devices."""
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
    """Yields one entry per block and action; a new version has two: the old one is destroyed, the new one created."""
    repeats = 1 + (changes.action == MemoryAction.INCREMENT_VERSION)
    time, action, size, category, later, _ = (np.repeat(column, repeats) for column in changes)
    is_destroyed = action == MemoryAction.DESTROY
    first = (np.cumsum(repeats) - repeats)[changes.action == MemoryAction.INCREMENT_VERSION]
    is_destroyed[first] = True
    category[first + 1] = later[first + 1]
    size[is_destroyed] *= -1
    return _lines([time, action, size, category])


def _sizes_by_category(changes: Changes) -> Iterator[bytes]:
    time, used = in_use(changes)
    yield b"[" + json.dumps(time.tolist()).encode() + b", "
    yield from _lines([np.zeros(len(time), dtype=np.int64), *used.T])
    yield b"]"


def _lines(columns: list[Array]) -> Iterator[bytes]:
    """Yields a JSON list of rows, in pieces."""
    yield b"["
    for begin in range(0, len(columns[0]), _LINES):
        rows = np.stack([column[begin : begin + _LINES] for column in columns], axis=1)
        yield (b", " if begin else b"") + json.dumps(rows.tolist())[1:-1].encode()
    yield b"]"


def in_use(changes: Changes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Times of changes, in whole microseconds, and the bytes in use after each by category, an array of shape (times, 8).

    Memory that existed before the recording counts from the first time on.
    """
    is_rise = changes.action == MemoryAction.INCREMENT_VERSION
    is_destroyed = changes.action == MemoryAction.DESTROY
    time = np.where(changes.time < 0, -1, changes.time // 1000)
    last = np.flatnonzero(np.append(time[1:] != time[:-1], True)) if len(time) else np.empty(0, dtype=np.int64)
    used = np.empty((len(last), len(Category)), dtype=np.int64)
    for category in Category:
        change = np.where(changes.later == category, np.where(is_destroyed, -changes.bytes, changes.bytes), 0)
        change -= np.where(is_rise & (changes.category == category), changes.bytes, 0)
        used[:, category] = np.cumsum(change)[last]
    time = time[last]
    if len(time) > 1 and time[0] < 0:
        time[0] = time[1]
    return time, used
