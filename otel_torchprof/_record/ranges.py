"""``emit_nvtx`` and ``emit_itt``: operators and labels as ranges of NVTX and ITT, for Nsight Systems, nvprof and VTune.

This package records nothing here: the ranges appear in the trace of the other tool.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from otel_torchprof import config
from otel_torchprof._native.python_sources import Label
from otel_torchprof._native.torch_ranges import Parts, itt_functions, nvtx_functions, ranges
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.profiler_flag import profiler_flag

from .labels import record_function

if TYPE_CHECKING:
    from typing_extensions import Self

    from otel_torchprof._native.torch_ranges import RangeFunctions, TorchRanges


class _Emission:
    """Base of both: between enter and exit, operators and labels of the thread are ranges."""

    _SYSTEM: ClassVar[str]

    def __init__(self, enabled: bool = True, record_shapes: bool = False, *, as_documented: bool = True) -> None:
        self.enabled = enabled
        self.entered = False
        self.record_shapes = record_shapes
        self.as_documented = as_documented
        self._handle = 0
        self._pid = 0

    def __enter__(self) -> Self | None:
        """Starts the ranges; returns None if not enabled.

        Raises:
            RuntimeError: the object was entered before, or the thread's operators are ranges already.
            TorchProfError: no library of the other profiler was found; the message has the searched names.
            TorchLibraryError: operators cannot be observed; the message names the fix.
        """
        if not self.enabled or not config.ENABLED.read():
            return None
        if self.entered:
            raise RuntimeError(f"{self._SYSTEM} annotation context manager is not reentrant")
        self._synchronize()
        self._handle = ranges().start(self._functions(), self._parts())
        self.entered = True
        self._pid = os.getpid()
        _labels.start(ranges())
        profiler_flag.up(self)
        if self.as_documented:
            self.mark("__start_profile")
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the ranges, from any thread.

        No effect if they do not run, or in a process that was forked meanwhile.
        """
        if not self._handle or self._pid != os.getpid():
            return
        try:
            self._synchronize()
        finally:
            if self.as_documented:
                self.mark("__stop_profile")
            handle, self._handle = self._handle, 0
            ranges().stop(handle)
            _labels.stop()
            profiler_flag.down(self)

    def mark(self, name: str) -> None:
        """Adds an instant to the other profiler's trace; no effect while the ranges do not run."""
        if self._handle:
            ranges().mark(self._handle, name)

    def _synchronize(self) -> None:
        """Waits for devices, so that earlier work is not inside the ranges."""

    def _functions(self) -> RangeFunctions:
        raise NotImplementedError

    def _parts(self) -> Parts:
        raise NotImplementedError


class emit_nvtx(_Emission):  # noqa: N801 - torch's name
    """Emits operators and labels as NVTX ranges, as torch's ``emit_nvtx``: for Nsight Systems (``nsys``) and nvprof.

    Covers the thread that enters it and the threads on which torch continues its work: autograd, ``jit.fork``. The text
    of a range is the operator's name, ``, seq = N`` (``, stashed seq = N`` for a backward function: the number of its
    forward operator), ``, op_id = N``, and with shapes ``, sizes = [[2, 3], []]`` (per input; ``[]`` for inputs other
    than tensors, lists of tensors flattened) and ``, input_op_ids = [(N,0), (0,-1)]`` (per input, the operator that
    produced it and the index of the output, if known). Marks ``__start_profile`` and ``__stop_profile`` are at both
    ends.

    Synchronizes with CUDA on enter and exit, as torch's does. Costs, besides NVTX itself, 0.2 us per operator, 0.3 us
    with shapes (measured; torch's own: 0.4 and 2.6), and 1.5 us per label; nothing when it is off. Each object can be
    used once, and a thread can have one at a time. May be exited on another thread.

    Args:
        enabled: False has no effect. Default: True.
        record_shapes: whether to add sizes and producers. Default: False.
        as_documented: False emits exactly the texts of torch 2.13: ``seq`` for backward functions too, and no marks.
            Default: True.

    Raises:
        RuntimeError: entered twice, or while the thread's operators are ranges already.
        AssertionError: torch was built without CUDA; torch's error.
        TorchProfError: no NVTX library was found; the message has the searched names and how to get one.

    Examples:
        >>> with otp.emit_nvtx(enabled=torch.cuda.is_available()):
        ...     y = torch.ones(3) + 1
    """

    _SYSTEM = "NVTX"

    def _synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def _functions(self) -> RangeFunctions:
        return nvtx_functions()

    def _parts(self) -> Parts:
        parts = Parts.SEQ | Parts.OP_ID
        if self.as_documented:
            parts |= Parts.STASHED
        return parts | Parts.SIZES | Parts.PRODUCERS if self.record_shapes else parts


class emit_itt(_Emission):  # noqa: N801 - torch's name
    """Emits operators and labels as ITT ranges, as torch's ``emit_itt``: for Intel VTune.

    Like :class:`emit_nvtx`, without CUDA. The text of a range is the operator's name and, with shapes,
    ``, sizes = [[2, 3], []]``. Without an attached collector the ranges have no effect, and there is no error.

    Args:
        enabled: False has no effect. Default: True.
        record_shapes: whether to add sizes. Default: False.
        as_documented: False emits exactly the texts of torch 2.13: names only, even with ``record_shapes``, and no
            marks. Default: True.

    Raises:
        RuntimeError: entered twice, or while the thread's operators are ranges already.
        TorchProfError: torch was built without ITT.

    Examples:
        >>> with otp.emit_itt(enabled=torch.profiler.itt.is_available()):
        ...     y = torch.ones(3) + 1
    """

    _SYSTEM = "ITT"

    def _functions(self) -> RangeFunctions:
        return itt_functions()

    def _parts(self) -> Parts:
        return Parts.SIZES if self.as_documented and self.record_shapes else Parts(0)


class _LabelRanges:
    """Emits labels as ranges, by methods that their class has only while ranges run: else labels cost nothing more."""

    def __init__(self) -> None:
        self._running = 0
        self._lock = threads.Lock()

    def start(self, native: TorchRanges) -> None:
        """Adds the methods with the first user."""
        with self._lock:
            self._running += 1
            if self._running == 1:
                for name, method in _label_methods(native).items():
                    setattr(record_function, name, method)

    def stop(self) -> None:
        """Removes the methods with the last user."""
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._take_away()

    def after_fork(self) -> None:
        """Resets a forked child, which emits no ranges; another thread may have held the lock."""
        self._lock = threads.Lock()
        if self._running:
            self._running = 0
            self._take_away()

    @staticmethod
    def _take_away() -> None:
        for name in ("__enter__", "__exit__", "suspend", "resume"):
            delattr(record_function, name)


_labels = _LabelRanges()
process_changes.at_fork(process_changes.Order.STATE, in_child=_labels.after_fork)


def _label_methods(native: TorchRanges) -> dict[str, Any]:
    def enter(label: record_function) -> record_function:
        entered = Label.__enter__(label)
        native.label_begin(id(label), label.name)
        return entered

    def leave(label: record_function, *exception: Any) -> None:
        native.label_end(id(label))
        Label.__exit__(label, *exception)

    # A waiting coroutine does not occupy its thread: other coroutines that run there are not inside it.
    def suspend(label: record_function) -> bool:
        native.label_end(id(label))
        return Label.suspend(label)

    def resume(label: record_function) -> bool:
        native.label_begin(id(label), label.name)
        return Label.resume(label)

    return {"__enter__": enter, "__exit__": leave, "suspend": suspend, "resume": resume}
