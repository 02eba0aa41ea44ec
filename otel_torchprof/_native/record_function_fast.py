"""Torch's ``_RecordFunctionFast``, with which compiled code labels its kernels and dynamo its phases.

It has an effect only while one of torch's profilers runs, so this package's recordings would not contain its labels.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from otel_torchprof._process import process_changes, threads

if TYPE_CHECKING:
    from .torch_functions import TorchFunctions

_NAME = "_RecordFunctionFast"


class FastRecords:
    """Makes labels of ``torch._C._profiler._RecordFunctionFast`` effective while operators are recorded.

    Meanwhile the class is replaced by one with the same arguments and the same effect; if torch's own profiler is on for the thread,
    the original decides alone. Observers of torch's operators get the labels, with inputs and keyword inputs if one of them requests
    inputs. Code that imported the name before a recording uses the original; code that imported it during one uses a class
    that costs half a microsecond more. Thread-safe.
    """

    def __init__(self) -> None:
        self.with_inputs = False
        """Whether any observer requests inputs."""
        self._lock = threads.RLock()  # a finalizer may stop a recording in the middle
        self._users: dict[int, bool] = {}
        self._original: Any = None
        self._ours: Any = None

    def follow(self, observer: int, functions: TorchFunctions, *, with_inputs: bool) -> None:
        """Adds an observer of torch's operators; without effect if torch has no such class, or this part was not compiled."""
        native: Any = sys.modules["torch"]._C._profiler  # noqa: SLF001 - there is no public name
        if not functions.stands_in or not hasattr(native, _NAME):
            return
        with self._lock:
            self._users[observer] = with_inputs
            self.with_inputs = any(self._users.values())
            if self._ours is None or getattr(native, _NAME) is not self._ours:
                self._original = getattr(native, _NAME)
                self._ours = _beginning_here(self._original, functions, self)
                setattr(native, _NAME, self._ours)

    def leave(self, observer: int) -> None:
        """Removes an observer; repeated calls have no effect."""
        with self._lock:
            self._users.pop(observer, None)
            self.with_inputs = any(self._users.values())
            if not self._users:
                self._give_back()

    def after_fork_in_child(self) -> None:
        """Removes all observers and renews the lock, which another thread may have held."""
        self._lock = threads.RLock()
        self._users.clear()
        self._give_back()

    def _give_back(self) -> None:
        if self._ours is None:
            return
        native: Any = sys.modules["torch"]._C._profiler  # noqa: SLF001 - as above
        # If other code has wrapped it since, it stays, and does what torch's class does.
        if getattr(native, _NAME) is self._ours:
            setattr(native, _NAME, self._original)
        self._original = self._ours = None


@functools.lru_cache(maxsize=1)  # creating it took 80 of the 175 us for starting a profile
def _beginning_here(original: Any, functions: TorchFunctions, records: FastRecords) -> Any:
    """Creates the class that replaces torch's. Each of its objects delegates to an object of torch's class."""
    native = functions.keeping_lock("otp_fast_records_")
    stand_in, stand_down = native.otp_fast_records_stand_in, native.otp_fast_records_stand_down

    class Replacement:
        __slots__ = ("_began_here", "_original")
        __doc__ = original.__doc__

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._original = original(*args, **kwargs)
            self._began_here = False

        def __enter__(self) -> None:
            self._began_here = is_standing = bool(stand_in(records.with_inputs))
            try:
                self._original.__enter__()
            finally:
                if is_standing:
                    stand_down()

        def __exit__(self, *exc_info: object) -> None:
            # Torch ends a label only while it sees a profiler.
            is_standing = self._began_here and stand_in(False)
            try:
                self._original.__exit__(*exc_info)
            finally:
                if is_standing:
                    stand_down()

    Replacement.__name__ = Replacement.__qualname__ = _NAME
    Replacement.__module__ = original.__module__
    return Replacement


fast_records = FastRecords()
"""The process-wide instance."""

process_changes.at_fork(process_changes.Order.STATE, in_child=fast_records.after_fork_in_child)
