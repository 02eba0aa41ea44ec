"""What feeds a recording's session beside the labels: torch's operators and memory, modules, compilations, Python's calls."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from ._compile_events import CompileEvents
from ._native import frames, torch_library
from ._torch_hooks import ModuleHooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._native.recorder import Session
    from ._recording import Wanted

_logger = logging.getLogger("otel_torchprof")


class Sources:
    """Started once, with a session that runs; stopped once, from any thread, or when nothing refers to it any more.

    Args:
        wanted: what the recording is to hold.
        library: what records torch's memory and operators; None where neither is recorded.
        operators: whether operators are recorded.
    """

    def __init__(self, wanted: Wanted, library: torch_library.TorchLibrary | None, *, operators: bool) -> None:
        self._wanted = wanted
        self._library = library
        self._operators = operators
        self._stops: list[Callable[[], object]] = []
        self._frames: frames.Tracing | None = None
        self._memory: torch_library.MemoryObservation | None = None
        self.notes: list[str] = []
        """What a reader of the recording should know of them, a sentence each."""
        self._stop = weakref.finalize(self, _stop_all, self._stops)

    def start(self, session: Session) -> None:
        """Lets the session have what it wants.

        Raises:
            TorchProfError: something stands in the way; nothing has been started then.
        """
        try:
            self._start_library(session)
            self._start_hooks()
            if self._wanted.frames:
                self._start_frames(session)
        except BaseException:  # a KeyboardInterrupt too
            _stop_all(self._stops)  # it may be started again, so the finalizer has to stay
            raise

    def _start_library(self, session: Session) -> None:
        if self._library is None:
            if self._wanted.memory:
                self.notes.append("memory is not recorded: torch is not installed")
            return
        if self._wanted.memory:
            self._memory = self._library.observe_memory(session)
            self._stops.append(self._memory.stop)
            if self._wanted.all_threads:
                self.notes.append(
                    "memory is recorded on the thread that started the profile and where torch carries its state, not on others"
                )
        if self._operators:
            self._stops.append(self._library.observe(session, self._wanted.facts()).stop)

    def _start_hooks(self) -> None:
        compilations = CompileEvents()
        compilations.install()
        self._stops.append(compilations.remove)
        if self._wanted.modules and torch_library.installed_torch() is not None:
            modules = ModuleHooks(survives_fork=False)
            modules.install(outermost_only=False)
            self._stops.append(modules.remove)

    def _start_frames(self, session: Session) -> None:
        try:
            tracing = frames.Tracing(session)
        except frames.FramesError as error:
            self.notes.append(f"frames off: {error}")
            _logger.warning("Python's calls are not recorded, and events have no stacks: %s", error)
            return
        self._frames = tracing
        self._stops.append(tracing.stop)
        if tracing.new_threads_tool:
            self.notes.append(f"frames off on threads that start later: {tracing.new_threads_tool} profiles them")
        if tracing.passed_over:
            self.notes.append(f"frames off on {tracing.passed_over} threads that another tool profiles")

    def stop(self) -> None:
        """Takes everything away; a second call does nothing."""
        self._stop()
        if self._frames is not None and self._frames.displaced:
            self.notes.append(f"frames were cut short on {self._frames.displaced} threads: another tool profiled them")
        if self._memory is not None and self._memory.was_cut:
            self.notes.append(
                "memory was recorded in part only: torch's profiler was started meanwhile, refused, and started again, and "
                "then torch takes its slot away from whoever is in it"
            )
        self._frames = self._memory = None


def _stop_all(stops: list[Callable[[], object]]) -> None:
    # Python's calls first, so that those of the others are not recorded.
    while stops:
        stops.pop()()
