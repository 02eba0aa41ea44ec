"""``otel-torchprof record``: records steps of running processes in more detail."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._export.file import naming
from otel_torchprof._export.file_exporter import PID, RANK
from otel_torchprof._export.formats import TRACE_ENDINGS, TRACES, endings_help, format_of
from otel_torchprof._files.rank_state import run_of
from otel_torchprof._process.control_wire import ControlError
from otel_torchprof.errors import TorchProfError

from .attach import ended_by_sigterm, reached
from .control_client import ControlCall, Process, ask_each, processes
from .run import explanation
from .run_outputs import name_with
from .terminal import display_progress, say, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

_DETAILS, _DEFAULT_STEPS = ("ops", "frames"), 25
"""As in the recorded process, whose modules this command does not import."""
_LEAST_SECONDS, _MOST_STEPS = 2.0, 1000
"""Length of a recording by default, for 20 samples of a line with a tenth of the time, and its most steps."""
_AWAITED = {
    "slow": "a slow step",
    "wait": "a step that waits long for other ranks",
    "memory": "a step that raises the memory by much",
}
"""By value of --keep, the step that ends the recording."""
_PREPARE_SECONDS = 900.0
"""Longest time for a process to build and load what records torch's operators: other work may have the machine."""
_SILENT_SECONDS = 120.0
"""Longest time without a line of progress; while it writes its file a process reports none."""
_MOST_UNKNOWN_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
"""Time in which a process that does not hang says where it is."""
_AHEAD_SECONDS = 3.0
"""Time from which on all processes are told a step to its begin."""

_WORD = os.urandom(8).hex()
"""Of the recordings of this command."""
_LOADING = "otel-torchprof: loading what records operators"
_DESCRIPTION = """\
Records steps of a running, instrumented process in more detail, without a restart: from its next step on the detail rises, after the
last step it falls to what it was. Ctrl-C ends it; nothing is written then.

examples:
  otel-torchprof record --pid 4711 --explain
  otel-torchprof record --all --steps 10 --detail frames -o slow.json.gz
  otel-torchprof record --pid 4711 --seconds 5 -o service.otlp
  otel-torchprof record --pid 4711 --keep slow --explain"""


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "record",
        help="record steps of a running process",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--pid", type=int, metavar="PID", help="process to record; from Python 3.14 on it need not be instrumented"
    )
    which.add_argument(
        "--all",
        action="store_true",
        help="record all instrumented processes of this machine, from the same step on, a file each",
    )
    add(
        "--steps",
        type=int,
        metavar="N",
        help="number of steps (default: 25, or those of 2 seconds, unless --seconds is given)",
    )
    add("--seconds", type=float, metavar="S", help="longest time; without --steps, all of it is recorded")
    add("--at-step", type=int, metavar="N", help="number of the first step (default: the next one)")
    add(
        "--keep",
        choices=("all", *_AWAITED),
        default="all",
        help="slow: record until a step takes three times the median of the last 200, and keep it "
        "and those before it, at most --steps, 25 by default; wait: the same for a step that waits long for other ranks; "
        "memory: for one that raises the memory of the process, or of a device, above that of the 200 steps before, by three times the "
        "median of such rises, 16 MiB and 1 %%; with --all, all ranks of a job keep the step that is found first; all: the first steps "
        "(default: all)",
    )
    add(
        "--slow-limit",
        type=float,
        metavar="S",
        help="with --keep slow or wait, seconds from which on a step, or its wait, is slow",
    )
    add("--detail", choices=_DETAILS, default="ops", help="level of detail (default: ops)")
    add("--shapes", action="store_true", help="record the shapes of operators' inputs")
    add(
        "-o",
        "--output",
        metavar="FILE",
        help=f"output: {endings_help(TRACES)}; of several processes each has its rank, or its pid, in its name "
        "(default: PROGRAM.record.trace.json.gz)",
    )
    add("--explain", action="store_true", help="report why the recorded steps are slow")
    add("-q", "--quiet", action="store_true", help="do not show progress")


class _Target(NamedTuple):
    """A process, what it says of itself, and the file that it gets."""

    process: Process
    status: Mapping[str, Any]
    path: str


def run(options: argparse.Namespace) -> int:
    """Records; returns 1 if any process could not be recorded, else 0.

    Raises:
        TorchProfError: there is no process, or no file can be written.
    """
    if options.output is not None and format_of(options.output, TRACES) is None:
        raise TorchProfError(f"--output is {options.output!r}; its name must end in {', '.join(TRACE_ENDINGS)}")
    with ExitStack() as stack:
        stack.enter_context(ended_by_sigterm())
        with display_progress(lambda: _LOADING, quiet=options.quiet):
            found = processes() if options.all else [stack.enter_context(reached(options.pid, builds=True))]
        return _record(found, options)


def _record(found: Sequence[Process], options: argparse.Namespace) -> int:
    if not found:
        raise ControlError(
            "no process of this machine is instrumented: start one with otel-torchprof run, opentelemetry-instrument or "
            "TorchInstrumentor().instrument()"
        )
    living, silent = _asked(found, "status", {}, _ANSWER_SECONDS)
    with display_progress(lambda: _LOADING, quiet=options.quiet):
        ready, failed = _asked([process for process, _ in living], "record", {"prepare": True}, _PREPARE_SECONDS)
    stated, errors = _asked([process for process, _ in ready], "status", {}, _SILENT_SECONDS)
    targets, now = _with_paths(_with_steps(stated, options), options.output), time.time_ns()
    recorded, more = _recorded(targets, [_arguments(options, target, targets, now) for target in targets], options)
    failed = [*silent, *failed]
    for error in (*failed, *errors, *more):
        say(str(error))
    if options.explain and recorded:
        print(explanation(recorded, options), end="")  # noqa: T201 - the result
    return 1 if failed or errors or more or not recorded else 0


def _asked(
    found: Sequence[Process], verb: str, arguments: Mapping[str, Any], seconds: float
) -> tuple[list[tuple[Process, Mapping[str, Any]]], list[ControlError]]:
    """Returns the answers of the processes that answered, and the errors of the others."""
    answers = ask_each([ControlCall(process, verb, arguments) for process in found], seconds=seconds)
    pairs = list(zip(found, answers, strict=True))
    return (
        [(process, answer) for process, answer in pairs if not isinstance(answer, ControlError)],
        [answer for _, answer in pairs if isinstance(answer, ControlError)],
    )


def _with_steps(
    stated: Sequence[tuple[Process, Mapping[str, Any]]], options: argparse.Namespace
) -> Sequence[tuple[Process, Mapping[str, Any]]]:
    """Those that have steps, if any has: what starts the ranks of a job has none, and would be waited for."""
    having = [each for each in stated if each[1].get("step") is not None]
    if not having or (options.seconds and not options.steps and options.keep not in _AWAITED):
        return stated
    for process, status in stated:
        if status.get("step") is None:
            say(f"process {process.pid} has no steps and is not recorded: record it by time (--seconds)")
    return having


def _with_paths(stated: Sequence[tuple[Process, Mapping[str, Any]]], output: str | None) -> list[_Target]:
    """Gives each process a file; of several, each has its rank in its name, or its pid where ranks are not different."""
    targets = []
    ranks = [_rank_of(status) for _, status in stated]
    has_ranks = None not in ranks and len(set(ranks)) == len(ranks)
    for (process, status), rank in zip(stated, ranks, strict=True):
        program = Path(str(status.get("program", ""))).stem.strip("-") or "program"
        name = output or f"{program}.record.trace.json.gz"
        parts = [] if len(stated) == 1 else [f"rank{rank}" if has_ranks else str(process.pid)]
        if PID in name or RANK in name:
            parts = []
        path = name.replace(PID, str(process.pid)).replace(RANK, str(0 if rank is None else rank))
        targets.append(_Target(process, status, name_with(path, parts) if parts else path))
    twice = [path for path, count in Counter(target.path for target in targets).items() if count > 1]
    if twice:
        raise TorchProfError(
            f"{twice[0]!r} would be the file of several processes: put {PID} into the name of --output"
        )
    return targets


def _rank_of(status: Mapping[str, Any]) -> int | None:
    rank = status.get("rank")
    return rank if isinstance(rank, int) and rank >= 0 else None


def _arguments(options: argparse.Namespace, target: _Target, targets: Sequence[_Target], now_ns: int) -> dict[str, Any]:
    """Returns the arguments of a request, with the step at which all processes of the same run and program begin."""
    names = ("steps", "seconds", "detail", "at_step", "keep", "slow_limit")
    arguments: dict[str, Any] = {name: getattr(options, name) for name in names}
    arguments["record_shapes"] = options.shapes
    group = [each.status for each in targets if _job_of(each.status) == _job_of(target.status)]
    has_steps = target.status.get("step") is not None
    if len(group) > 1 and options.keep in _AWAITED:
        arguments["shared"] = _WORD
    if len(group) > 1 and has_steps and options.at_step is None and not (options.seconds and not options.steps):
        arguments["at_step"] = common_step(group, now_ns)
    if not options.steps and not options.seconds and options.keep not in _AWAITED:
        shortest = min((status.get("step_seconds") or _LEAST_SECONDS for status in group), default=_LEAST_SECONDS)
        arguments["steps"] = min(max(math.ceil(_LEAST_SECONDS / shortest), _DEFAULT_STEPS), _MOST_STEPS)
    return {name: value for name, value in arguments.items() if value is not None}


class _SharedStep:
    """Tells all recorded ranks of a job which step they keep: the first that one of them finds.

    Args:
        targets: the processes.
        word: what the requests have as ``shared``.
    """

    def __init__(self, targets: Sequence[_Target], word: str) -> None:
        self._targets, self._word = targets, word
        self._chosen: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        self._told: set[int] = set()

    def note(self, target: _Target, progress: Mapping[str, Any]) -> None:
        """Takes a line of progress: it may have a step, and shows that the process still waits for one."""
        job = _job_of(target.status)
        if job in self._chosen:
            self._tell([target], self._chosen[job])
        elif "found" in progress:
            rank = _rank_of(target.status)
            who = f"process {target.process.pid}" if rank is None else f"rank {rank}"
            self._chosen[job] = {"end_at": progress["found"], "why": f"{who}: {progress['why']}"}
            self._tell([each for each in self._targets if _job_of(each.status) == job], self._chosen[job])

    def _tell(self, targets: Sequence[_Target], chosen: Mapping[str, Any]) -> None:
        """Tells processes that do not know it yet; of one that does not answer the next line of progress shows whether it waits."""
        untold = [each.process for each in targets if each.process.pid not in self._told]
        answered, _ = (
            _asked(untold, "record", {"shared": self._word, **chosen}, _ANSWER_SECONDS) if untold else ([], [])
        )
        self._told.update(process.pid for process, _ in answered)


def _job_of(status: Mapping[str, Any]) -> tuple[Any, ...]:
    return str(status.get("program")), *run_of(status)


def common_step(statuses: Sequence[Mapping[str, Any]], now_ns: int) -> int | None:
    """The number of a step that no process has begun yet in some seconds, of those that have steps; None if none has."""
    steps = []
    for status in statuses:
        last, end, seconds = (status.get(name) for name in ("step", "step_end_ns", "step_seconds"))
        if last is None or end is None or seconds is None:
            continue
        # The status may be as old as the latest drain; if it is far older, the loop pauses.
        old = min(max(now_ns - end, 0) / 1e9, _MOST_UNKNOWN_SECONDS)
        steps.append(last + 2 + math.ceil((old + _AHEAD_SECONDS) / max(seconds, 1e-6)))
    return max(steps, default=None)


def _recorded(
    targets: Sequence[_Target], arguments: Sequence[Mapping[str, Any]], options: argparse.Namespace
) -> tuple[list[str], list[ControlError]]:
    """Has the processes record and write; returns the paths of the files, which appear when they are complete, and the errors."""
    progress: dict[int, Mapping[str, Any]] = {}
    paths: list[str] = []
    written: list[str] = []
    errors: list[ControlError] = []

    shared = _SharedStep(targets, _WORD)

    def note(call: ControlCall, value: Mapping[str, Any]) -> None:
        progress[call.process.pid] = value
        shared.note(targets[calls.index(call)], value)

    def keep(call: ControlCall, answer: Mapping[str, Any] | ControlError) -> None:
        progress.pop(call.process.pid, None)
        place = calls.index(call)
        path = targets[place].path
        if isinstance(answer, ControlError):
            errors.append(ControlError(f"{answer}; {path} is not written"))
            return
        files[place].keep()  # now: another process may be waited for without end
        paths.append(path)
        written.append(_summary(targets[place], answer))

    def tell() -> None:
        for text in written:
            say(text)

    with ExitStack() as stack:
        if not options.quiet:
            stack.callback(tell)
        files = [stack.enter_context(_PendingFile(target.path)) for target in targets]
        calls = [
            ControlCall(target.process, "record", {**of_one, "name": target.path}, (file.descriptor,))
            for target, file, of_one in zip(targets, files, arguments, strict=True)
        ]
        with display_progress(lambda: _line(progress, arguments), quiet=options.quiet, at_once=True):
            ask_each(calls, seconds=_SILENT_SECONDS, on_progress=note, on_answer=keep)
    return paths, errors


class _PendingFile:
    """An open file that has its name only once it is kept."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._temporary = self._path.with_name(f".otel-torchprof-{os.urandom(8).hex()}.tmp")
        with naming(path):
            self.descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        self._temporary.unlink(missing_ok=True)

    def keep(self) -> None:
        """Gives the file its name."""
        with naming(str(self._path)):
            self._temporary.replace(self._path)


def _line(progress: Mapping[int, Mapping[str, Any]], of_each: Sequence[Mapping[str, Any]]) -> str:
    """The line of progress: that of the process that is furthest behind."""
    if not progress:
        return "otel-torchprof: waiting"
    arguments = of_each[0]
    least = min(progress.values(), key=lambda value: int(value.get("steps", 0)))
    if arguments["keep"] in _AWAITED:
        is_over = least.get("state") not in ("waiting", "recording")
        state = least["state"] if is_over else f"waiting for {_AWAITED[arguments['keep']]}"
        return f"otel-torchprof: {state}, {least.get('steps', 0):,} steps seen"
    asked = arguments.get("steps", "" if "seconds" in arguments else _DEFAULT_STEPS)
    of_all = f" of {asked}" if asked else ""
    begins = {each.get("at_step") for each in of_each}
    at = f" (from step {arguments['at_step']})" if len(begins) == 1 and "at_step" in arguments else ""
    return f"otel-torchprof: {least.get('state', '')}{at}: {least.get('steps', 0)}{of_all} steps"


def _summary(target: _Target, answer: Mapping[str, Any]) -> str:
    first, count = answer["first_step"], answer["steps"]
    steps = (
        "no whole step" if first is None else f"steps {first} to {first + count - 1}" if count > 1 else f"step {first}"
    )
    lost = f", {answer['dropped']:,} dropped" if answer["dropped"] else ""
    cut = ", ended early" if answer["is_cut"] else ""
    notes = "".join(f"; {note}" for note in answer["notes"])
    return (
        f"process {target.process.pid}: {steps}{cut}, {answer['events']:,} events{lost}, {size(answer['bytes'])} before compression, "
        f"in {target.path}{notes}"
    )
