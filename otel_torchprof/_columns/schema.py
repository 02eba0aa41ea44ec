"""The table of columns: name, dtype, unit and meaning of all data that a batch has per event.

Rows are grouped by thread and, within a thread, ordered by the start of the events; so a parent's row precedes
the rows of its children. The native drain fills these arrays (``otp_batch`` in ``recorder.h``); a test
compares the two lists.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

NEVER = int(np.iinfo(np.int64).max)
"""Largest time, Unix ns: the end of open events."""


class Kind(enum.IntEnum):
    """Kind of an event (column ``kind``)."""

    OPERATOR = 1
    """A RecordFunction of torch: operator, backward function, TorchScript function, torch's own label."""
    LABEL = 2
    """A label written by this package's ``record_function``."""
    MODULE = 3
    """The forward pass of a module, reported by torch's module hooks; its name is the module's full name in its root."""
    FRAME = 4
    """A call of a Python or C function, or a pause of Python's garbage collector."""
    PHASE = 5
    """A phase of a training loop, see :class:`~otel_torchprof._columns.phases.Part`: its part is in ``fwd_thread``, its object in
    ``sequence_nr``."""


MEMORY_KIND = 255
"""``kind`` of rows made from memory records, see :mod:`~otel_torchprof._model.memory`; no recorder writes it."""
WORK_KIND = 254
"""``kind`` of rows made from the work of devices, see :mod:`~otel_torchprof._model.device_work`; no recorder writes it."""


class Scope(enum.IntEnum):
    """``at::RecordScope`` of torch (column ``scope``)."""

    FUNCTION = 0
    BACKWARD_FUNCTION = 1
    TORCHSCRIPT_FUNCTION = 2
    KERNEL_FUNCTION_DTYPE = 3
    CUSTOM_CLASS = 4
    BUILD_FEATURE = 5
    LITE_INTERPRETER = 6
    USER_SCOPE = 7
    STATIC_RUNTIME_OP = 8
    STATIC_RUNTIME_MODEL = 9


class Flag(enum.IntFlag):
    """Bits of the column ``flags``."""

    ASYNC = 1
    """Began on one thread and ended on another, or declared asynchronous by torch."""
    UNFINISHED = 2
    """Still open when the recording stopped; its end is the time of the stop."""
    ERROR = 4
    """A label that an exception left; the class of the exception is in ``error_type``."""
    LOSS_BEFORE = 8
    """Events of this thread were dropped between the previous recorded event and this one."""
    INPUTS_CUT = 16
    """More inputs than one record can hold; the last ones are missing from ``inputs``."""
    ROOT = 128
    """A module that is no part of the one around it, or has none around it; known at its end."""


class MemoryFlag(enum.IntFlag):
    """Bits of the column ``flags`` of memory."""

    OUT_OF_MEMORY = 1
    """The allocator had no ``bytes`` to give."""


class WorkFlag(enum.IntFlag):
    """Bits of the column ``flags`` of the work of devices."""

    ANNOTATION = 1
    """No work, but the time from the first to the last work that was launched inside a label."""


class CollectiveFlag(enum.IntFlag):
    """Bits of the column ``flags`` of collectives."""

    TRANSFER = 1
    """A send or a receive: between two ranks, and the backend does not number it alike on both."""
    ASYNC = 2
    """Its caller does not wait for it immediately."""


class Column(NamedTuple):
    """One column of a batch."""

    name: str
    dtype: np.dtype
    unit: str
    meaning: str


def _column(name: str, dtype: type, unit: str, meaning: str) -> Column:
    return Column(name, np.dtype(dtype), unit, meaning)


COLUMNS: tuple[Column, ...] = (
    _column("id", np.uint64, "", "id of the event, unique in the process, increasing within a thread; never 0"),
    _column("start", np.int64, "ns", "start time, Unix time"),
    _column("end", np.int64, "ns", "end time, Unix time; never before start"),
    _column("sequence_nr", np.int64, "", "torch's autograd sequence number, -1 for none"),
    _column("name", np.uint32, "", "index into Batch.names"),
    _column("parent", np.int32, "row", "row of the enclosing event on the same thread, -1 for none"),
    _column("thread", np.uint32, "", "index into Batch.threads: thread where the event began"),
    _column("end_thread", np.uint32, "", "index into Batch.threads: thread where the event ended"),
    _column("fwd_thread", np.uint32, "", "torch's id of the forward operator's thread, 0 for none"),
    _column(
        "error_type", np.uint32, "", "index into Batch.names: class of the exception that left the event, 0 for none"
    ),
    _column("kind", np.uint8, "", "kind of the event, see Kind"),
    _column("scope", np.uint8, "", "at::RecordScope, see Scope"),
    _column("flags", np.uint8, "", "bits, see Flag"),
)
"""Every column that is always there, widest first (so that no padding is needed when they share one allocation)."""

INPUTS = _column("inputs", np.int64, "words", "offset of the inputs in Batch.inputs, -1 if none were recorded")
"""Optional: present when the recording had ``record_shapes``."""

CONTEXT = _column("context", np.uint32, "", "number of the thread's current span when the event began, 0 for none")
"""Optional: present when the recording follows the service's spans."""

OPTIONAL: tuple[Column, ...] = (INPUTS, CONTEXT)
"""Columns that only some recordings have."""

MEMORY_COLUMNS: tuple[Column, ...] = (
    _column("time", np.int64, "ns", "time of the allocation or release, Unix time"),
    _column("bytes", np.int64, "bytes", "size of the block, negative for a release"),
    _column("address", np.uint64, "", "address of the block; its release has the same address"),
    _column(
        "total_allocated", np.int64, "bytes", "total allocated by the allocator afterwards, -1 if it does not report it"
    ),
    _column(
        "total_reserved",
        np.int64,
        "bytes",
        "total reserved by the allocator from the system, -1 if it does not report it",
    ),
    _column("event", np.uint64, "", "id of the enclosing event on the same thread, 0 for none"),
    _column("thread", np.uint32, "", "index into Batch.threads"),
    _column("device_type", np.int32, "", "c10::DeviceType: 0 CPU, 1 CUDA, ..."),
    _column("device_index", np.int32, "", "index of the device within its type; -1 if there is only one"),
    _column("flags", np.uint8, "", "bits, see MemoryFlag"),
)
"""The columns of :attr:`Batch.memory`, which has rows of its own: by thread, and within a thread by time."""

DEVICE_COLUMNS: tuple[Column, ...] = (
    _column("event", np.uint64, "", "id of the event that launched the work"),
    _column(
        "start",
        np.int64,
        "ns",
        "time when the device reached the timing event at the event's start, Unix time, by calibration",
    ),
    _column(
        "duration",
        np.int64,
        "ns",
        "time from there to the timing event at the event's end, by the device's clock; never negative",
    ),
    _column("stream", np.int64, "", "torch's Stream.stream_id of the stream of both timing events"),
    _column("device_type", np.int32, "", "c10::DeviceType: 1 CUDA, 6 HIP, 12 XPU, 20 PrivateUse1, ..."),
    _column("device_index", np.int32, "", "index of the device within its type"),
)
"""The columns of :attr:`Batch.devices`, which has rows of its own, in no order; an event has at most one."""

WORK_COLUMNS: tuple[Column, ...] = (
    _column("event", np.uint64, "", "id of the event that launched the work, 0 if unknown"),
    _column("start", np.int64, "ns", "start time, Unix time"),
    _column("duration", np.int64, "ns", "duration on the device"),
    _column("stream", np.int64, "", "number of the stream in the trace"),
    _column("bytes", np.int64, "bytes", "size of a copy; -1 if unknown"),
    _column("correlation", np.int64, "", "number that it shares with the call that launched it; -1 for none"),
    _column("name", np.uint32, "", "index into Batch.names: the kernel, the kind of copy, or the label"),
    _column("category", np.uint32, "", "index into Batch.names: kernel, gpu_memcpy, ..."),
    _column("thread", np.uint32, "", "index into Batch.threads: the track of the stream"),
    _column("device_type", np.int32, "", "c10::DeviceType: 1 CUDA, 12 XPU, ..."),
    _column("device_index", np.int32, "", "index of the device within its type"),
    _column("flags", np.uint8, "", "bits, see WorkFlag"),
)
"""The columns of :attr:`Batch.work`, which has rows of its own, by track, and within a track by start."""

ENERGY_COLUMNS: tuple[Column, ...] = (
    _column("time", np.int64, "ns", "time of the reading, Unix time"),
    _column("joules", np.float64, "J", "energy that the device consumed since an arbitrary time in the past"),
    _column("device_index", np.int32, "", "index of the device in torch"),
)
"""The columns of :attr:`Batch.energy`, which has rows of its own, in no order."""

COLLECTIVE_COLUMNS: tuple[Column, ...] = (
    _column("event", np.uint64, "", "id of the collective's event"),
    _column(
        "sequence_nr",
        np.int64,
        "",
        "number of the collective in its group, from 1, the same on every rank; for a send or receive, its number in "
        "the step between these ranks with this tag, from 0; -1 if unknown",
    ),
    _column("bytes_in", np.int64, "bytes", "size of this rank's input tensors"),
    _column("bytes_out", np.int64, "bytes", "size of this rank's output tensors"),
    _column("group", np.uint32, "", "index into Batch.names: name of the process group, the same on every rank"),
    _column(
        "ranks", np.uint32, "", "index into Batch.names: global ranks of the group, separated by commas; 0: all ranks"
    ),
    _column("backend", np.uint32, "", "index into Batch.names: gloo, nccl, ..."),
    _column("dtype", np.uint32, "", "index into Batch.names: type of the first tensor, 0 for none"),
    _column("reduce_op", np.uint32, "", "index into Batch.names: sum, max, ...; 0 for none"),
    _column(
        "repeat", np.uint32, "", "number among the collectives with the same sequence number from the backend, from 0"
    ),
    _column("group_size", np.int32, "", "number of ranks in the group"),
    _column("rank", np.int32, "", "this rank's number in the group"),
    _column("peer", np.int32, "", "other rank of a send or receive, as its number in the group; -1 for none or any"),
    _column(
        "root", np.int32, "", "root of a broadcast, reduce, gather or scatter, as its number in the group; -1 for none"
    ),
    _column("tag", np.int32, "", "tag of a send or receive; -1 for none"),
    _column("flags", np.uint32, "", "bits, see CollectiveFlag"),
)
"""The columns of :attr:`Batch.collectives`, which has rows of its own, in no order; an event has at most one."""

REDUCTION_COLUMNS: tuple[Column, ...] = (
    _column("event", np.uint64, "", "id of the event; 0: a span that is no event, such as a root"),
    _column("start", np.int64, "ns", "start time of the event or span, Unix time"),
    _column("calls", np.int64, "", "number of calls that the event stands for"),
    _column("duration", np.int64, "ns", "total duration of these calls"),
    _column("collapsed", np.int64, "", "number of collapsed calls inside it"),
    _column("collapsed_duration", np.int64, "ns", "total duration of the top-level collapsed calls"),
    _column("flops", np.int64, "", "floating-point operations of its calls, as in the file; -1: not in the file"),
)
"""The columns of :attr:`Batch.reductions`, which has rows of its own, in no order; an event has at most one."""

COLUMN_NAMES: tuple[str, ...] = tuple(column.name for column in COLUMNS)
