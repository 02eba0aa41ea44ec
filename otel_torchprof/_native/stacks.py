"""Stacks of Python's threads, read while they run and without Python's lock (``stack_reader.h``)."""

from __future__ import annotations

import sys
import threading

from otel_torchprof.errors import NativeError

from .ffi import python_sources

_MARK = 0x5EED123
"""A line that no code begins at."""
_LONGEST = 512
"""Characters of a file's path, of which the end is read, and calls of a stack."""


def writer() -> int:
    """The address of the function that writes the stacks of all threads, for :func:`.hang_watch.start`. Costs under a millisecond.

    Raises:
        NativeError: they cannot be read here. Where the interpreter keeps them is no part of its API; it is looked for, and believed only
            if the calling thread's own stack is read as Python itself tells it.
    """
    problem = next(map(_Probe().run, (None,)))  # with a call of C in between
    if problem is not None:
        raise NativeError(problem)
    return python_sources.stacks_writer()


class _Probe:
    def run(self, _: None) -> str | None:
        frame = sys._getframe()  # noqa: SLF001 - what is compared with
        problem = python_sources.find_stacks(frame, frame.f_code.replace(co_firstlineno=_MARK))
        if problem is not None:
            return problem
        read, line = python_sources.read_stack(threading.get_native_id()), frame.f_lineno
        expected = [(self.run.__code__.co_filename, line, "run")]
        while frame.f_back is not None and len(expected) < _LONGEST:
            frame = frame.f_back
            expected.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        same = read == [(_as_read(path), line, _as_read(name)) for path, line, name in expected]
        return None if same else "this interpreter's frames are read in another way than it shows them"


def _as_read(text: str) -> str:
    return text.encode("utf-8", "replace").decode()[-_LONGEST:]
