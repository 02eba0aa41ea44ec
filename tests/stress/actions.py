"""What programs do beside recording: labels, tasks, threads, generators, collections, other tracers, forks."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import sys
import threading
import time
import traceback
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles import HANDED_OVER, IN_TASK

import otel_torchprof as otp
from otel_torchprof._native.recorder import recorder_stats

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator

    from world import Worker

CALM_THRESHOLD, CALM_INTERVAL = (700, 10, 10), 0.005
_STANDARD = str(Path(threading.__file__).parent)
CHILD_SECONDS = 60
"""How long a forked child may take."""
HUNG = 1
"""Status of a child that faulthandler ended since it took half of that."""
FAILED = 71


def labels(worker: Worker) -> None:
    """Labels in labels, some left by an exception."""
    with contextlib.suppress(ZeroDivisionError), worker.label("args"), worker.label():
        worker.some(2)
        if worker.chance(0.3):
            raise ZeroDivisionError


def decorated(worker: Worker) -> None:
    """Labels as decorators of functions and generators, of which some are left in the middle."""

    @worker.label()
    def function() -> None:
        worker.some(1)

    @otp.record_function(HANDED_OVER)
    def generator() -> Any:
        yield from range(5)

    function()
    running = generator()
    for _ in range(worker.random.randint(0, 6)):
        next(running, None)
    if worker.chance(0.5):
        running.close()
    elif worker.chance(0.5):
        with contextlib.suppress(KeyError, StopIteration):
            running.throw(KeyError("thrown"))
    if running.gi_frame is not None:
        worker.world.open_labels.append(running)


def handed_over(worker: Worker) -> None:
    """Ends what another thread began, begins what another thread ends."""
    with contextlib.suppress(IndexError):
        found = worker.world.open_labels.popleft()
        if isinstance(found, otp.record_function):
            found.__exit__(None, None, None)
        else:
            found.close()
    if len(worker.world.open_labels) < 10:
        label = otp.record_function(HANDED_OVER)
        label.__enter__()
        worker.world.open_labels.append(label)


def tasks(worker: Worker) -> None:
    """Tasks with labels that take turns; some are cancelled, some time out."""

    async def work(depth: int) -> None:
        with worker.label(kind=IN_TASK):
            await decorated_work()
        if depth:
            await asyncio.gather(work(depth - 1), work(depth - 1))
        await asyncio.sleep(0)

    async def decorated_work() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def main() -> None:
        running = [asyncio.ensure_future(work(2)) for _ in range(4)]
        for _ in range(worker.random.randint(0, 5)):
            await asyncio.sleep(0)
        for task in running:
            if worker.chance(0.3):
                task.cancel()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(
                asyncio.gather(*running, return_exceptions=True), worker.random.choice([0, 0.001, 5])
            )

    asyncio.run(main())


def threads(worker: Worker) -> None:
    """Threads that end while they are recorded."""

    def work() -> None:
        with otp.record_function("thread"):
            sorted(range(5), key=lambda number: -number)

    started = [threading.Thread(target=work) for _ in range(worker.random.randint(1, 4))]
    for thread in started:
        thread.start()
    if worker.chance(0.5):
        with futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda number: sorted([number]), range(4)))
    for thread in started:
        thread.join()


def yielding(worker: Worker) -> None:
    """Calls between which another thread, or another greenlet, takes its turn."""
    for _ in range(worker.random.randint(1, 5)):
        with worker.label():
            time.sleep(0)


def _deep(calls: int) -> int:
    return 1 + _deep(calls - 1) if calls else 0


def recursion(worker: Worker) -> None:
    """Deep calls, up to the interpreter's limit, which unwinds them all."""
    with contextlib.suppress(RecursionError):
        _deep(worker.random.choice([20, 200, 100_000]))


@contextlib.contextmanager
def _alone(worker: Worker) -> Iterator[bool]:
    """Whether this is the one place that slows all threads down: two at a time, and none of them makes progress."""
    alone = worker.world.slowed.acquire(blocking=False)
    try:
        yield alone
    finally:
        if alone:
            worker.world.slowed.release()


def collecting(worker: Worker) -> None:
    """Collections of young objects at every allocation, on all threads, for a few actions."""
    with _alone(worker) as alone:
        gc.set_threshold(*((1, 10, 100) if alone else gc.get_threshold()))
        try:
            worker.some()
        finally:
            if alone:
                gc.set_threshold(*CALM_THRESHOLD)


def switching(worker: Worker) -> None:
    """Threads that change at nearly every opportunity, for a few actions."""
    with _alone(worker) as alone:
        if alone:  # with 1e-6 and ten threads, these do nothing but wait for the interpreter's lock
            sys.setswitchinterval(1e-6 if threading.active_count() < 4 else 1e-4)
        try:
            worker.some()
        finally:
            if alone:
                sys.setswitchinterval(CALM_INTERVAL)


def _tool(*_: object) -> Any:
    return _tool


def other_tracer(worker: Worker) -> None:
    """Another tool that takes the profile function or the trace function, and puts back what it found, or nothing."""
    get, give = worker.random.choice([(sys.getprofile, sys.setprofile), (sys.gettrace, sys.settrace)])
    before = get() if worker.chance(0.3) else None
    worker.world.tools += 1
    give(_tool)
    try:
        worker.some(1)
    finally:
        give(before if callable(before) else None)  # that of cProfile is not


def other_profiler(worker: Worker) -> None:
    """cProfile, which is refused where another tool has what it needs (since Python 3.12)."""
    profiler = cProfile.Profile()
    worker.world.profilers.append(profiler)
    worker.world.tools += 1
    with contextlib.suppress(ValueError):
        profiler.enable()
    try:
        worker.some(1)
    finally:
        profiler.disable()


def monitored(worker: Worker) -> None:
    """Another tool of sys.monitoring, where there is one."""
    monitoring = getattr(sys, "monitoring", None)
    number = worker.random.randrange(6)
    if monitoring is None or monitoring.get_tool(number) is not None:
        return
    try:
        monitoring.use_tool_id(number, "another")
    except ValueError:  # somebody else was faster
        return
    try:
        monitoring.register_callback(number, monitoring.events.PY_START, _tool)
        monitoring.set_events(number, monitoring.events.PY_START | monitoring.events.PY_RETURN)
        worker.some(1)
    finally:
        monitoring.set_events(number, 0)
        monitoring.register_callback(number, monitoring.events.PY_START, None)
        monitoring.free_tool_id(number)


class _Interrupts:
    """Raises KeyboardInterrupt on the worker that collects it."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        thread = threading.current_thread()
        if thread.name.startswith("worker"):
            interrupt_thread(thread)


def is_fair(frame: types.FrameType | None) -> bool:
    """Whether an interrupt may come in a frame.

    Not in the standard library, which leaves its locks taken then: those of imports, of logging, of conditions. Nor where a
    tracer asks there which calls it is to leave out; nor, however far below, where a thread is started: CPython gives the new one
    its starter's ident until it runs, so that it might be the one that is interrupted, before it has said that it runs.
    """
    outer = frame
    while outer is not None:
        if outer.f_code is threading.Thread.start.__code__:
            return False
        outer = outer.f_back
    while frame is not None and frame.f_code.co_filename.endswith("frame_filter.py"):
        frame = frame.f_back
    if frame is None:  # a thread that begins: whoever starts it waits for it to say so
        return False
    path = frame.f_code.co_filename
    return not path.startswith("<frozen") and ("site-packages" in path or not path.startswith(_STANDARD))


def interrupt_thread(thread: threading.Thread) -> None:
    """Raises KeyboardInterrupt where a thread is, or will be when it runs again, if that is fair."""
    ident, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
    # Nobody else runs between question and answer: a thread that this one starts has its ident at first, so that the interrupt
    # would end that one before it has said that it runs, and its starter would wait for ever.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5.0)
    try:
        if is_fair(sys._current_frames().get(thread.ident or 0)):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
    finally:
        sys.setswitchinterval(interval)


def interrupting(worker: Worker) -> None:
    """An interrupt that comes out of a collection of garbage, on whichever worker that happens."""
    if worker.world.interrupts:
        _Interrupts()
        worker.some(1)


# ---- forks ----


def in_child(worker: Worker) -> None:
    """What a forked child does: everything of the parent's is off, and a new profile records."""
    faulthandler.dump_traceback_later(CHILD_SECONDS / 2, exit=True)
    if recorder_stats().sessions != 0 and not otp.TorchInstrumentor().is_instrumented_by_opentelemetry:
        worker.world.fail("a forked child has recordings that run")
    for provider in list(worker.world.providers):
        provider.force_flush(2000)
    assert otp.TorchInstrumentor().health is not None
    with otp.profile(with_stack=True) as found:
        for _ in range(3):
            with otp.record_function("in child"):
                sorted(range(3), key=lambda number: -number)
    names = [found.names[name] for name in found.columns["name"].tolist()]
    if names.count("in child") != 3:
        worker.world.fail(f"a forked child recorded {names.count('in child')} of 3 labels")
    faulthandler.cancel_dump_traceback_later()


def forked(worker: Worker) -> None:
    """A child that records and ends."""
    children = worker.world.children
    if not worker.world.forks or len(children) > 4:
        return
    if worker.chance(0.3):
        process = multiprocessing.get_context("fork").Process(target=_child, args=(worker,))
        process.start()
        children.append(Child(process.pid or 0, process))
        return
    pid = os.fork()
    if pid == 0:
        status = FAILED
        try:
            status = _child(worker, leave=False)
        finally:
            os._exit(status)
    children.append(Child(pid))


def _child(worker: Worker, *, leave: bool = True) -> int:
    status, before = FAILED, len(worker.world.failures)
    try:
        in_child(worker)
        status = FAILED if len(worker.world.failures) > before else 0
    except KeyboardInterrupt:  # was on its way to the thread that forked
        status = 0
    except Exception:  # noqa: BLE001 - the status reports it
        traceback.print_exc()
    if leave and status:
        sys.exit(status)
    return status


@dataclass
class Child:
    """A forked process."""

    pid: int
    process: Any = None
    """That of multiprocessing, which waits for it."""
    deadline: float = field(default_factory=lambda: time.monotonic() + CHILD_SECONDS)

    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        if self.process is not None:
            return self.process.exitcode
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


ACTIONS = {
    "labels": labels,
    "decorated": decorated,
    "handed over": handed_over,
    "tasks": tasks,
    "threads": threads,
    "yielding": yielding,
    "recursion": recursion,
    "collecting": collecting,
    "switching": switching,
    "other tracer": other_tracer,
    "other profiler": other_profiler,
    "monitored": monitored,
    "interrupting": interrupting,
    "forked": forked,
}
