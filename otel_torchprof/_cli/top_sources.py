"""Where ``otel-torchprof top`` learns what processes do: from their black boxes, and from the control sockets of those without one."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof._answers.running import FIRST_LOOKS_NS, WINDOW_NS, ProcessView, RunningProcess, with_late_ranks
from otel_torchprof._files.box_file import SUFFIX, box_of, is_of_the_living, opened, process_folder
from otel_torchprof._files.rank_state import run_of
from otel_torchprof._native.blackbox import ImageReader
from otel_torchprof._process import threads
from otel_torchprof._process.control_wire import client_folders
from otel_torchprof._process.private_folder import default_folder
from otel_torchprof.errors import NativeError, TorchProfError

from .control_client import ControlCall, Process, ask_each, processes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_STATM_BYTES = 256
_PAGE = os.sysconf("SC_PAGE_SIZE")
_YOUNG_SECONDS = 60.0
"""Age of a file below which it may be a box that its process is about to lock."""
_ANSWER_SECONDS = 2.0
_EVERY_SECOND = 1.0
_MEMORY_NS = 5 * 10**9
"""Time between two readings of a process's memory."""
_PATIENCE_NS = 5 * 10**9
"""Time after which an answer of a process is not displayed any more."""
_SELDOM = 5
"""Polls from one question to the next to a process whose box has all but the memory of devices and rates."""


class RunningBox:
    """The box of a living process. Not thread-safe.

    Raises:
        OSError, TorchProfError: it cannot be read (yet).
    """

    def __init__(self, path: Path, now: int) -> None:
        self._last_ns = 0
        self.is_busy = True
        """Whether its process has recorded something since the look before."""
        self._folder: Path | None = None
        self._resident: int | None = None
        self._resident_ns = 0
        with opened(path) as file:
            self._reader = ImageReader.of_file(file)
            for back in FIRST_LOOKS_NS:
                self.process = RunningProcess(now - WINDOW_NS)
                self.view = self.look(now, now - back)
                if self.view.step_rate is not None or not self.process.has_trained:
                    break

    def look(self, now: int, since: int | None = None) -> ProcessView:
        """Reads what is new, or what there is since a time. Raises NativeError if the file was cut."""
        contents = self._reader.read(self.process.reads_from if since is None else since)
        self.is_closed = contents.is_closed
        self.is_busy, self._last_ns = contents.last_ns > self._last_ns, contents.last_ns
        view = self.process.look(contents, now)
        if now - self._resident_ns >= _MEMORY_NS:
            self._folder = self._folder or process_folder(contents.info)
            self._resident, self._resident_ns = _resident(self._folder), now
        self.view = view._replace(host_bytes=self._resident)
        return self.view


class Boxes:
    """The boxes of living processes in folders; processes come and end. Not thread-safe.

    Args:
        places: folders, and boxes.
        pids: the processes to look at; empty: all.
    """

    def __init__(self, places: Iterable[Path], pids: Collection[int] = ()) -> None:
        self.places = set(places)
        self._pids = pids
        self.running: dict[Path, RunningBox] = {}
        self._dead: set[Path] = set()
        self.problems: dict[Path, str] = {}

    def look(self, now: int) -> list[ProcessView]:
        """What the processes do, at a time in Unix ns; costs some 100 us per process, and 50 ns per event since the last look."""
        paths = set(self._paths())
        for path in self.running.keys() - paths:
            del self.running[path]
        self._dead &= paths
        views = []
        for path in sorted(paths - self._dead):
            view = self._look_at(path, now)
            if view is not None:
                views.append(view)
        return views

    def _paths(self) -> Iterable[Path]:
        for place in self.places:
            if place.is_dir():
                names = [name for name in os.listdir(place) if name.endswith(SUFFIX)]  # noqa: PTH208 - cheap
                yield from (place / name for name in names if self._is_wanted(name))
            elif place.exists():
                yield place

    def _is_wanted(self, name: str) -> bool:
        return not self._pids or any(f".{pid}." in f".{name}" for pid in self._pids)

    def _look_at(self, path: Path, now: int) -> ProcessView | None:
        try:
            box = self.running.get(path)
            is_known = (box is not None and box.is_busy) or path.parts[1:2] == (
                "proc",
            )  # there, it ends with its process
            if not is_known and not is_of_the_living(path):
                self.running.pop(path, None)
                if time.time() - path.stat().st_ctime > _YOUNG_SECONDS:
                    self._dead.add(path)
                return None
            if box is None:
                box = self.running[path] = RunningBox(path, now)
            else:
                box.look(now)
            self.problems.pop(path, None)
        except (OSError, NativeError) as error:  # made, removed or cut just now; or of another version
            self.running.pop(path, None)
            if isinstance(error, NativeError):
                self.problems[path] = str(error)
            return None
        return None if box.is_closed else box.view


class Statuses:
    """Answers of processes over their control sockets. :meth:`poll` on one thread; the rest on any.

    Args:
        pids: the processes to ask; empty: all.
    """

    def __init__(self, pids: Collection[int] = ()) -> None:
        self._pids = pids
        self.answers: dict[int, Mapping[str, Any]] = {}
        """By pid; with ``asked_ns``."""
        self.numbered: set[int] = set()
        """Processes with a box whose number of the step is known."""
        self._polls = 0
        self._names: set[str] = set()
        self._processes: Sequence[Process] = ()
        self._over = threads.Event()
        self._thread = threads.Thread(target=self._run, name="otel-torchprof-top", daemon=True)

    @property
    def pids(self) -> set[int]:
        """The processes that are wanted by number or have a socket, also those that do not answer."""
        return {*self._pids, *(each.pid for each in self._processes if not self._pids)}

    def start(self) -> None:
        """Polls once a second."""
        self._thread.start()

    def stop(self) -> None:
        """Ends that, without waiting for it."""
        self._over.set()

    def poll(self) -> None:
        """Asks each process of which more is needed; returns when all have answered, or after two seconds."""
        with suppress(OSError, TorchProfError):
            found = {name for folder in client_folders() for name in os.listdir(folder)}  # noqa: PTH208 - cheap
            if found != self._names:
                self._names, self._processes = found, processes()
        self._polls += 1
        wanted = [each for each in self._processes if not self._pids or each.pid in self._pids]
        asked = [each for each in wanted if each.pid not in self.numbered or self._has_more(each.pid)]
        calls = [ControlCall(each, "status", {"drain": each.pid not in self.numbered}) for each in asked]
        answers = ask_each(calls, seconds=_ANSWER_SECONDS)
        now = time.time_ns()
        for process, answer in zip(asked, answers, strict=True):
            if not isinstance(answer, Exception) and _is_status(answer):
                self.answers[process.pid] = {**answer, "asked_ns": now}

    def _has_more(self, pid: int) -> bool:
        """Whether it is time to ask a process for what its box does not have."""
        answer = self.answers.get(pid, {})
        return self._polls % _SELDOM == 0 and (answer.get("device_bytes") is not None or bool(answer.get("rates")))

    def _run(self) -> None:
        while not self._over.wait(_EVERY_SECOND):
            self.poll()


class Sources:
    """All that ``top`` displays. Not thread-safe.

    Args:
        folders: of boxes; empty: that of this user, and the boxes of processes that answer.
        pids: the processes; empty: all.
    """

    def __init__(self, folders: Sequence[Path], pids: Collection[int]) -> None:
        self.pids = pids
        self._finds_boxes = not folders
        self._found: set[int] = set()
        self.boxes = Boxes(folders or [default_folder()], pids)
        self.statuses = Statuses(pids) if self._finds_boxes else None

    def look(self, now: int) -> list[ProcessView]:
        """What the processes do, by run and rank; with late ranks marked."""
        answers = {} if self.statuses is None else self.statuses.answers.copy()
        for pid in set() if self.statuses is None else self.statuses.pids - self._found:
            self._found.add(pid)
            if path := box_of(pid):
                self.boxes.places.add(path)
        by_pid = {box.view.pid: box.process.steps for box in self.boxes.running.values()}
        for pid, answer in answers.items():
            if (
                pid in by_pid
                and not by_pid[pid].is_numbered
                and answer.get("step") is not None
                and answer.get("step_end_ns")
            ):
                by_pid[pid].number(int(answer["step"]), int(answer["step_end_ns"]))
        if self.statuses is not None:
            self.statuses.numbered = {pid for pid, steps in by_pid.items() if steps.is_numbered}
        views = [_with_answer(view, answers.get(view.pid), now) for view in self.boxes.look(now)]
        seen = {view.pid for view in views}
        for pid, answer in answers.items():
            if pid not in seen and now - int(answer["asked_ns"]) < _PATIENCE_NS:
                views.append(view_of_status(pid, answer, now))
        return with_late_ranks(views)


def _is_status(answer: Mapping[str, Any]) -> bool:
    """Whether an answer, which may be that of another version, has what is displayed."""
    numbers = (answer.get(key) for key in ("step", "step_end_ns", "step_seconds", "step_median", "device_bytes"))
    found = [answer.get(key) or {} for key in ("phases", "rates")]
    return (
        all(isinstance(number, (int, float, type(None))) for number in numbers)
        and all(isinstance(each, dict) for each in found)
        and all(isinstance(number, (int, float)) for each in found for number in each.values())
    )


def _with_answer(view: ProcessView, answer: Mapping[str, Any] | None, now: int) -> ProcessView:
    """The view of a process with a box, with what only its answers have, which are 5 s apart."""
    if answer is None or now - int(answer["asked_ns"]) > 3 * _PATIENCE_NS:
        return view
    return view._replace(device_bytes=answer.get("device_bytes"), rates=answer.get("rates"))


def view_of_status(pid: int, status: Mapping[str, Any], now: int) -> ProcessView:
    """The view of a process without a box, from its answer to ``status``."""
    step, seconds, rank = status.get("step"), status.get("step_seconds"), status.get("rank")
    return ProcessView(
        pid,
        rank if isinstance(rank, int) else None,
        run_of(status),
        str(status.get("program") or ""),
        str(status.get("host") or ""),
        None if step is None else int(step) + 1,
        True,
        1 / seconds if seconds else None,
        status.get("phases") or {},
        [],
        [],
        now,
        host_bytes=_resident(Path(f"/proc/{pid}")),
        device_bytes=status.get("device_bytes"),
        rates=status.get("rates"),
        line=str(status.get("line") or ""),
        step_seconds=status.get("step_median"),
    )


def _resident(folder: Path | None) -> int | None:
    """Resident memory of a process, in bytes; None if it cannot be seen."""
    with suppress(OSError, ValueError, IndexError):
        if folder is not None:
            with open(f"{folder}/statm", "rb", buffering=0) as file:  # noqa: PTH123 - cheap
                return int(file.read(_STATM_BYTES).split()[1]) * _PAGE
    return None
