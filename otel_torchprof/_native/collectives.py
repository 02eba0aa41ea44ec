"""What collectives are, as the torch library tells it: their groups, numbers and sizes."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.schema import COLLECTIVE_COLUMNS
from otel_torchprof.errors import TorchLibraryError

if TYPE_CHECKING:
    import numpy.typing as npt

    from .recorder import Session
    from .torch_functions import TorchFunctions

MOST = 1 << 16
"""Collectives of one recording that may wait to be taken: 5 MB."""

_ENTRY = np.dtype([(column.name, column.dtype) for column in COLLECTIVE_COLUMNS])
"""``otp_collective``."""
_ROOM = 4096

Collectives = dict[str, "npt.NDArray[Any]"]
"""Arrays of :data:`~otel_torchprof._columns.schema.COLLECTIVE_COLUMNS`."""


class Collecting:
    """The collectives of one session, from now until :meth:`stop` or until nothing refers to it any more. Thread-safe.

    Raises:
        TorchLibraryError: torch refused.
    """

    def __init__(self, functions: TorchFunctions, session: Session, most: int = MOST) -> None:
        self._ffi, self._native = functions.ffi, functions.lib
        self._token = int(self._native.otp_torch_collectives_start(session.consumer, most))
        if self._token == 0:
            raise TorchLibraryError("torch refused to report collectives")
        self._dropped = 0
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _stop, self._native, self._token, self._pid)
        self._finalizer.atexit = False

    def take(self) -> Collectives:
        """Those that were not taken before, in no order; none after the stop."""
        parts = []
        while True:
            part = np.empty(_ROOM, dtype=_ENTRY)
            out = self._ffi.from_buffer("otp_collective[]", part)
            count = int(self._native.otp_torch_collectives_take(self._token, out, _ROOM))
            parts.append(part[:count])
            if count < _ROOM:
                break
        found = np.concatenate(parts)
        return {column.name: np.ascontiguousarray(found[column.name]) for column in COLLECTIVE_COLUMNS}

    @property
    def lost(self) -> int:
        """How many there was no room for."""
        if self._finalizer.alive:
            self._dropped = int(self._native.otp_torch_collectives_lost(self._token))
        return self._dropped

    def stop(self) -> Collectives:
        """Ends it, and gives the rest; none in a forked child, and when called again."""
        if not self._finalizer.alive:
            return no_collectives()
        rest, self._dropped = self.take(), self.lost
        _stop(self._native, self._token, self._pid)
        self._finalizer.detach()
        return rest


def no_collectives() -> Collectives:
    """None."""
    return {column.name: np.empty(0, column.dtype) for column in COLLECTIVE_COLUMNS}


def _stop(native: Any, token: int, pid: int) -> None:
    if os.getpid() == pid:
        native.otp_torch_collectives_stop(token)
