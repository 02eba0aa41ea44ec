"""What all Chrome JSON of this package is made of: metadata, texts, and the memory that native encoders write into."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._native.ffi import ffi, lib
from otel_torchprof._native.loops import pointer

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Names

PIECE_SIZE = 1 << 20
"""Bytes after which a piece is handed out."""

LARGEST_TID = 2**31 - 1
"""Perfetto takes a thread id that does not fit, 0 and -1 for the main thread."""

# Tools lay the traces of several processes side by side by "ts" alone, so processes must count from the same time: the
# start of a week. Counting from 1970 would leave a double (which is how viewers read "ts") steps of 250 ns; within a week
# they are 0.1 ns.
BASE_GRID_NS = 7 * 24 * 3600 * 10**9


def compact(value: Any) -> str:
    """A value as JSON without blanks. Raises ValueError for NaN and infinities, which JSON does not have."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def metadata_event(kind: str, pid: int, tid: int, **args: Any) -> str:
    """One event that says something about a process or a track."""
    return compact({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})


def microseconds(nanoseconds: int) -> str:
    """Nanoseconds as microseconds with three decimals, exactly."""
    sign, size = ("-" if nanoseconds < 0 else ""), abs(nanoseconds)
    return f"{sign}{size // 1000}.{size % 1000:03d}"


def valid(text: str) -> str:
    """Text without lone surrogates, which are no valid JSON."""
    return text.encode("utf-8", "replace").decode()


def escaped_names(names: Names) -> tuple[dict[str, Any], object]:
    """The names as JSON text, each escaped once: the fields of an ``otp_names``, and what they point into."""
    names = names.flat()
    data = np.ascontiguousarray(names.data, dtype=np.uint8)
    raw_ends = np.ascontiguousarray(names.ends, dtype=np.uint64)
    raw = {"data": pointer(data), "ends": pointer(raw_ends), "count": len(raw_ends)}
    ends = np.empty(len(raw_ends), dtype=np.uint64)
    buffer = new_buffer()
    checked(lib.otp_json_escape_names(ffi.new("otp_names *", raw), buffer, pointer(ends)))
    return {"data": buffer.data, "ends": pointer(ends), "count": len(ends)}, (buffer, ends)


def new_buffer() -> Any:
    """An empty ``otp_buffer`` that is freed with the last reference to it."""
    return ffi.gc(ffi.new("otp_buffer *"), lib.otp_buffer_free)


def checked(result: int) -> int:
    """What a native encoder returned. Raises MemoryError where it had none."""
    if result < 0:
        raise MemoryError("no memory left to encode the Chrome trace; encode fewer events at a time")
    return result
