"""Stacks of Python's threads, read without the GIL: whether they can be, and samples of them."""

from __future__ import annotations

import functools
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from otel_torchprof._columns.samples import COMPREHENSIONS, WAITS_FOR_LOCK, Call
from otel_torchprof._process import process_changes
from otel_torchprof.errors import NativeError

from .ffi import python_sources

if TYPE_CHECKING:
    import numpy.typing as npt

_MARK = 0x5EED123
"""First line that no real code has."""
LONGEST = 512
"""Limit of the characters read from the end of a file's path, and of the calls of a stack."""
KEPT_OF_LONGER = 64
"""Of a stack with more calls, how many of the innermost are kept."""

sample_loop = python_sources.sample_loop


@functools.cache
def stacks_problem() -> str | None:
    """Returns why stacks cannot be read here; None if they can. Costs under a millisecond, once.

    Their location in the interpreter is not part of its API: it is searched, and accepted only if it gives the same stack of
    the calling thread as Python's API.
    """
    return next(map(_Probe().run, (None,)))  # through map, so that the stack has a C call


class _Probe:
    def run(self, _: None) -> str | None:
        frame = sys._getframe()  # noqa: SLF001 - for the comparison
        problem = python_sources.find_stacks(frame, frame.f_code.replace(co_firstlineno=_MARK))
        if problem is not None:
            return problem
        read, line = python_sources.read_stack(threading.get_native_id()), frame.f_lineno
        expected = [(self.run.__code__.co_filename, line, "run")]
        while frame.f_back is not None:
            frame = frame.f_back
            expected.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        if len(expected) > LONGEST:
            del expected[KEPT_OF_LONGER:]
        same = read == [(_as_read(path), line, _as_read(name)) for path, line, name in expected]
        return None if same else "this interpreter's frames are read in another way than it shows them"


def _as_read(text: str) -> str:
    return text.encode("utf-8", "replace").decode()[-LONGEST:]


_MOST_KNOWN = 4096
_LIBRARY = sysconfig.get_paths()["stdlib"]
"""The folder of Python's own modules, and of installed packages."""


class RecordedStacks(Sequence[tuple[Call, ...]]):
    """The different stacks that were sampled in this process and those that it was forked from; they only grow. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Call, ...]] = {0: ()}
        self._calls: dict[int, tuple[int, Call]] = {}
        """By the number of a stack, that of the stack around its innermost call, and that call: stacks share their outer calls."""

    def __len__(self) -> int:
        return python_sources.sampled_stacks()

    @overload
    def __getitem__(self, index: int) -> tuple[Call, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[Call, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[Call, ...] | list[tuple[Call, ...]]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        stack = self._known.get(index)
        if stack is None:
            at = range(len(self))[index]
            calls = []
            outer = at
            while outer:
                known = self._calls.get(outer)
                if known is None:
                    number, file, line, function = python_sources.sampled_stack(outer)
                    is_wait = file == WAITS_FOR_LOCK and not function and 0 < line < outer
                    call = self._holder(line) if is_wait else Call(file, line, function)
                    known = self._calls[outer] = number, call
                outer, innermost = known
                calls.append(innermost)
            if len(self._known) > _MOST_KNOWN:
                self._known = {0: ()}
            stack = self._known[at] = tuple(calls)
        return stack

    def _holder(self, at: int) -> Call:
        """The call that stands for a wait for the lock: the innermost line of the program in the stack of the thread that has it."""
        stack = self[at]
        call, *others = [call for call in stack if not call.file.startswith((_LIBRARY, "<"))] or stack
        names = (each.function for each in (call, *others) if each.function.rpartition(".")[2] not in COMPREHENSIONS)
        return Call(f"{WAITS_FOR_LOCK} {call.file}", call.line, next(names, call.function))


STACKS = RecordedStacks()
"""Those of all samples of this process."""

TAKEN = np.dtype([("time", "i8"), ("duration", "i8"), ("ident", "u8"), ("os_tid", "u4"), ("stack", "u4")])
"""A sample: Unix ns, ns, its thread by Python's ident and the system's id, and index into :data:`STACKS`."""


class Sampling:
    """Samples the stacks of loops' threads, from the start until :meth:`stop`. Thread-safe.

    A native thread of the process takes them, without the GIL, and keeps half a million of those that some sampling has not taken.
    Costs the sampled thread nothing, and the system about 10 us a sample.

    Args:
        rate: samples a second, of each thread; another sampling of the same process may make it more.
        here: samples the calling thread only, instead of all on which phases or steps are recorded.

    Raises:
        NativeError: stacks cannot be read here, or the system has no thread for it.
    """

    def __init__(self, rate: float, *, here: bool) -> None:
        problem = stacks_problem()
        if problem is not None:
            raise NativeError(problem)
        own = f"{Path(__file__).parent.parent}/"
        try:
            self._user = python_sources.start_samples(round(1e9 / rate), own, here)
        except MemoryError as error:
            raise NativeError("the system has no memory or thread left for it") from error
        self.lost = 0
        """Samples that were not taken in time."""
        self.cut = 0
        """Samples of the process, meanwhile, without their innermost calls: there are too many different ones."""

    def stop(self) -> None:
        """Stops; the samples until now can be taken. Repeated calls have no effect."""
        python_sources.stop_samples(self._user)

    def take(self, until: int) -> npt.NDArray[Any]:
        """Returns the samples before this time (Unix ns) that were not taken yet (:data:`TAKEN`)."""
        taken, self.lost, self.cut = python_sources.take_samples(self._user, until)
        return np.frombuffer(taken, TAKEN)


process_changes.at_exit(process_changes.Order.LAST, python_sources.end_samples)
# A child of a fork beside the thread could have some of what it wrote last, and not what it wrote before that. Since 3.12 Python
# warns of forks beside other threads; it counts them after all that could start this one again.
process_changes.at_fork(
    process_changes.Order.LAST,
    before=python_sources.pause_samples,
    in_parent=python_sources.resume_samples if sys.version_info < (3, 12) else None,
)
