"""What the actions of one round share: the seeded numbers, the workers, the failures."""

from __future__ import annotations

import collections
import logging
import os
import random
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Action = Callable[["Worker"], object]

_MOST_NESTED = 3
"""Actions inside actions."""


@dataclass
class World:
    """One round."""

    seed: int
    until: float
    """When workers begin no more actions, as ``time.monotonic()`` has it."""
    folder: Path
    http_url: str
    grpc_url: str
    forks: bool
    interrupts: bool
    asan: bool
    greenlets: bool
    """Whether gevent has made greenlets of all threads."""
    failures: list[str] = field(default_factory=list)
    actions: dict[str, Action] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    slowed: threading.Lock = field(default_factory=threading.Lock)
    """Held by the action that slows all threads down."""
    begun: int = 0
    """Workers so far."""
    tools: int = 0
    """How often another tool took a thread's profile function."""
    profilers: list[Any] = field(default_factory=list)
    """cProfile's, kept: CPython 3.12 and 3.13 write to one that is dropped while it is called, by what a collection in there runs."""
    done: collections.Counter[str] = field(default_factory=collections.Counter)
    """Actions that ended, by name; ``NAME interrupted`` likewise."""
    children: list[Any] = field(default_factory=list)
    """Forked processes that may still run."""
    providers: collections.deque[Any] = field(default_factory=collections.deque)
    """Providers that were instrumented and not shut down."""
    open_labels: collections.deque[Any] = field(default_factory=collections.deque)
    """Labels begun on one thread that another is to end."""
    streams: list[Any] = field(default_factory=list)
    """Streams that run."""
    left_profiles: collections.deque[Any] = field(default_factory=collections.deque)
    """Running profiles that any thread may stop."""

    def fail(self, what: str) -> None:
        """Notes a failure; the round goes on."""
        if len(self.failures) < 20:
            self.failures.append(what)
            os.write(2, f"FAILURE {what}\n".encode())

    def fail_by(self, where: str, found: Any) -> None:
        """Notes an exception, unless it is an interrupt, or what an interrupt left of somebody else's object."""
        lines = traceback.format_exception(found.exc_type, found.exc_value, found.exc_traceback)
        text = "".join(lines)
        if (
            found.exc_type is KeyboardInterrupt
        ):  # may have ended a thread before it said that it runs: then its starter waits for ever
            os.write(2, f"interrupted: {where}\n".encode())
        elif not (self.interrupts and "otel_torchprof" not in text):
            self.fail(f"{where}: {text}")

    @property
    def is_over(self) -> bool:
        """Whether workers end."""
        return time.monotonic() > self.until

    def watch_what_nobody_catches(self) -> None:
        """Makes failures of exceptions in finalizers and threads, and of those that our log reports."""

        def unraisable(found: Any) -> None:
            self.fail_by(f"unraisable in {found.object!r}", found)

        def in_thread(found: Any) -> None:
            self.fail_by(f"thread {found.thread}", found)

        sys.unraisablehook, threading.excepthook = unraisable, in_thread
        logging.getLogger("otel_torchprof").addHandler(_Logged(self))


class _Logged(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] not in (None, KeyboardInterrupt):
            self._world.fail(f"logged: {record.getMessage()}\n{''.join(traceback.format_exception(*record.exc_info))}")


class Worker:
    """A thread that runs actions, with random numbers of its own."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.random = random.Random(f"{world.seed} {name}")
        self.labels: collections.Counter[str] = collections.Counter()
        """Labels that began on this thread, by name."""
        self.is_acting = False
        """Whether an interrupt may come: of the main thread."""
        self.is_profiled_by_torch = False
        """Whether torch's own profiler runs on this thread."""
        self._nested = 0

    def label(self, args: str | None = None, kind: str = "label") -> otp.record_function:
        """A label of this thread's, which is about to begin here."""
        name = f"{self.name} {kind} {self.random.randrange(20)}"
        self.labels[name] += 1
        return otp.record_function(name, args)

    def chance(self, share: float) -> bool:
        """True as often as this share says."""
        return self.random.random() < share

    def act(self) -> None:
        """One action."""
        world = self.world
        if self._nested >= _MOST_NESTED or world.is_over:
            return leaf_calls(self)
        name = self.random.choices(list(world.weights), list(world.weights.values()))[0]
        self._nested += 1
        try:
            world.actions[name](self)
            world.done[name] += 1
        except KeyboardInterrupt:
            world.done[f"{name} interrupted"] += 1
            raise
        finally:
            self._nested -= 1
        return None

    def some(self, most: int = 3) -> None:
        """Up to so many actions, one after the other."""
        for _ in range(self.random.randint(0, most)):
            self.act()

    def run_one(self) -> None:
        """One action, whose failure is noted."""
        try:
            self.is_acting = True
            self.act()
        except KeyboardInterrupt:
            self._nested = 0
        except Exception:  # noqa: BLE001 - whatever it is, it is the result
            self._nested = 0
            self.world.fail(f"{self.name}: {traceback.format_exc()}")
        finally:
            self.is_acting = False

    def run(self) -> None:
        """Acts until the round is over. An interrupt that comes between two actions ends the thread."""
        while not self.world.is_over:
            self.run_one()


def leaf_calls(worker: Worker) -> None:
    """Calls of Python and C functions, with objects that the collector looks at."""
    for number in range(worker.random.randint(1, 30)):
        sorted([[number], [len("x")]], key=lambda item: item[0])
