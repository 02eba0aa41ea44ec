"""The words in which inputs are kept, read natively over whole columns (``inputs.h``). Thread-safe; without the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .ffi import ffi, lib

Array = npt.NDArray[Any]

STORAGE = np.dtype(
    [
        ("address", np.uint64),
        ("bytes", np.uint64),
        ("row", np.int64),
        ("input", np.int32),
        ("device_type", np.uint8),
        ("device_index", np.uint8),
        ("reserved", np.uint16),
    ]
)
"""``otp_storage``: memory that a tensor among a row's inputs is in, and which of the inputs that is."""


_ALL_KEPT = 0xFFFFFFFF


class InputWords:
    """Words and, per row, the offset among them, both int64 (``otp_inputs``)."""

    def __init__(self, words: Array, offsets: Array) -> None:
        words, offsets = np.ascontiguousarray(words, dtype=np.int64), np.ascontiguousarray(offsets, dtype=np.int64)
        self._alive = words, offsets
        self._native = ffi.new("otp_inputs *")
        self._native.words, self._native.word_count = ffi.from_buffer("int64_t[]", words), len(words)
        self._native.offsets, self._native.row_count = ffi.from_buffer("int64_t[]", offsets), len(offsets)

    def numbers(self, parts: int, names: Array | None = None) -> tuple[npt.NDArray[np.int32], int]:
        """A number from 0 per row, equal where parts (``otp_input_part``) and names are, and how many numbers there are.

        Raises:
            MemoryError: there is none left.
        """
        numbers = np.empty(self._native.row_count, dtype=np.int32)
        given = ffi.NULL
        if names is not None:
            names = np.ascontiguousarray(names, dtype=np.uint32)
            given = ffi.from_buffer("uint32_t[]", names)
        count = lib.otp_inputs_number(self._native, given, parts, ffi.from_buffer("int32_t[]", numbers))
        if count < 0:
            raise MemoryError("no memory to tell the inputs of events apart")
        return numbers, int(count)

    def storages(self) -> Array:
        """The storages of all rows' inputs, as an array of :data:`STORAGE`, by row."""
        found = np.empty(lib.otp_inputs_storages(self._native, ffi.NULL), dtype=STORAGE)
        lib.otp_inputs_storages(self._native, ffi.cast("otp_storage *", found.ctypes.data))
        return found

    def text_ids(self, kind: int) -> npt.NDArray[np.uint32]:
        """Per row, the name of its first extra of a kind, or of its first string; 0 for none."""
        ids = np.zeros(self._native.row_count, dtype=np.uint32)
        lib.otp_inputs_texts(self._native, kind, ffi.from_buffer("uint32_t[]", ids))
        return ids

    def kept(self, what: int) -> tuple[Array, Array] | None:
        """New words and offsets with only that much of the inputs (``otp_input_kept``); None where that is all of them."""
        size = self._keep(what)
        if what and size == self._keep(_ALL_KEPT):
            return None
        words = np.empty(size, dtype=np.int64)
        offsets = np.empty(self._native.row_count, dtype=np.int64)
        self._keep(what, ffi.from_buffer("int64_t[]", words), ffi.from_buffer("int64_t[]", offsets))
        return words, offsets

    def _keep(self, what: int, words: Any = ffi.NULL, offsets: Any = ffi.NULL) -> int:
        places = np.full(self._native.word_count, -2, dtype=np.int64)
        found: int = lib.otp_inputs_keep(self._native, what, ffi.from_buffer("int64_t[]", places), words, offsets)
        return found


def input_type_name(header: int) -> str:
    """Torch's name for the type of an input with this header."""
    name: bytes = ffi.string(lib.otp_input_type_name(header))
    return name.decode()
