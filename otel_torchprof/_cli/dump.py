"""``otel-torchprof dump``: what each thread of running processes does now."""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from otel_torchprof._answers.dumped import ProcessDump, dump_of_box
from otel_torchprof._columns.phases import PHASE_PREFIX
from otel_torchprof._files.box_file import box_of
from otel_torchprof._files.box_reading import read_box
from otel_torchprof._process.control_wire import ControlError
from otel_torchprof.errors import TorchProfError, printable

from .attach import reached
from .control_client import SECONDS, ControlCall, Process, ask_each, processes
from .terminal import say, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from otel_torchprof._answers.dumped import RunningCall


_IMPORTS = "<frozen importlib"
"""File of the calls that import a module: the text leaves them out."""


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "dump",
        help="print what each thread of a running process does now",
        description="Prints the Python stack of each thread, with the operators, labels, modules and phases that are open and for how long "
        "(with a black box), outer ones first. A process that does not answer within five seconds, since a thread keeps the interpreter's "
        "lock, is read from its black box: what is open, and the stacks that its hang watch wrote. Exit status: 0 if every process answered, "
        "else 1.",
    )
    parser.add_argument("pid", metavar="PID", type=int, nargs="*", help="process")
    parser.add_argument("--all", action="store_true", help="all instrumented processes of this user")
    parser.add_argument("--json", action="store_true", help="print a JSON list of the processes; times in Unix ns")


def run(options: argparse.Namespace) -> int:
    """Prints what the threads do; returns 1 if a process did not answer, else 0.

    Raises:
        TorchProfError: nothing is known of the process, or there is no process.
    """
    if bool(options.pid) == options.all:
        raise TorchProfError("name process ids, or --all for all instrumented processes of this user")
    dumps, problems = _dumps(options.pid)
    if not dumps:
        raise TorchProfError(
            "; ".join(problems)
            or "no instrumented process of this user runs: start one with otel-torchprof run or instrument()"
        )
    plain = json.dumps([dump.plain() for dump in dumps], indent=1) + "\n"
    show(plain if options.json else "\n".join(map(as_text, dumps)))
    for problem in problems:
        say(problem)
    return 1 if problems else 0


def _dumps(pids: Sequence[int]) -> tuple[list[ProcessDump], list[str]]:
    """What processes do, all if none are named, and why some did not say it."""
    dumps, problems = [], []
    for pid, answer in _answers(pids):
        if isinstance(answer, ControlError):
            problems.append(str(answer))
            found = _from_box(pid, str(answer))
            dumps += [] if found is None else [found]
        else:
            dumps.append(ProcessDump.of(answer))
    return dumps, problems


def _answers(pids: Sequence[int]) -> list[tuple[int, Any]]:
    """The answers, or errors, of processes by pid."""
    with ExitStack() as stack:
        found = [(pid, _found(pid, stack)) for pid in pids] if pids else [(each.pid, each) for each in processes()]
        asked = [each for _, each in found if isinstance(each, Process)]
        answers = ask_each([ControlCall(each, "dump", {}) for each in asked], seconds=SECONDS)
    failed = [
        (pid, each) for pid, each in found if isinstance(each, ControlError)
    ]  # without a socket: they may have a box
    return [*((each.pid, answer) for each, answer in zip(asked, answers, strict=True)), *failed]


def _found(pid: int, stack: ExitStack) -> Process | ControlError:
    try:
        return stack.enter_context(reached(pid))
    except ControlError as error:
        return error


def _from_box(pid: int, why: str) -> ProcessDump | None:
    """What the box of a process says; None if it has none that can be read."""
    try:
        path = box_of(pid)
        return (
            None
            if path is None
            else dump_of_box(read_box(str(path)), time.time_ns(), [f"from its black box, since {why}"])
        )
    except TorchProfError:
        return None


def as_text(dump: ProcessDump) -> str:
    """The text that is printed of a process."""
    return "\n".join(map(printable, _lines(dump))) + "\n"


def _lines(dump: ProcessDump) -> Iterator[str]:
    rank = "" if dump.rank is None else f", rank {dump.rank}"
    at = time.strftime("%H:%M:%S", time.localtime(dump.time_ns / 1e9))
    yield f"process {dump.pid} ({dump.program or 'python'}{rank}) at {at}"
    yield from (f"note: {note}" for note in dump.notes)
    for thread in dump.threads:
        yield f"thread {thread.name or thread.os_tid} ({thread.os_tid or 'not known'})"
        yield from (_line(place, dump.time_ns) for place in thread.places if not place.file.startswith(_IMPORTS))


def _line(place: RunningCall, now: int) -> str:
    if place.kind == "python":
        return f"{'':12}  {_short(place.file)}:{place.line} {place.name}"
    seconds = max(now - place.since_ns, 0) / 1e9
    return f"{seconds:10,.3f} s  {place.kind} {place.name.removeprefix(PHASE_PREFIX)}"


def _short(path: str) -> str:
    """The path within its package folder, if it is installed."""
    return re.sub(r".*/(?:site-packages|lib/python3[.\d]*)/", "", path)
