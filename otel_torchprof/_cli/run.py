"""``otel-torchprof run``: profiles a script without changes to it."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import fcntl
import glob
import importlib
import os
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof._encode.table import SORT_KEYS
from otel_torchprof._export.file_exporter import own_path
from otel_torchprof._export.formats import TRACES, endings_help
from otel_torchprof._files.box_file import SUFFIX, BoxFile, memory_file
from otel_torchprof._process import process_changes
from otel_torchprof._process.descriptors import OwnDescriptor
from otel_torchprof._process.threads import name_thread
from otel_torchprof._ranks.ranks import identity_in
from otel_torchprof.errors import TorchProfError, printable_lines
from otel_torchprof.health import ON
from otel_torchprof.parsers import BlackBoxOptions

from .run_outputs import (
    check_outputs,
    exporters_of,
    file_names,
    name_of_rank,
    of_last_attempt,
    pattern_of_ranks,
    place_among_ranks,
    policy_of,
)
from .run_program import NoProgramError, Program
from .terminal import OwnStderr, Progress, duration, reading, say, size
from .watcher import start_watcher

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from otel_torchprof._files.box import BlackBox


# ---- State of the interpreter that a script may change, restored while our code runs at the end ----

_MISSING: Any = object()
_STANDARD = 2
"""The highest descriptor of stdin, stdout and stderr."""


class InterpreterState:
    """Modules, builtins and the attributes of ``sys`` and ``os`` at one moment."""

    def __init__(self) -> None:
        self._sys = vars(sys)
        self._saved = [(namespace, dict(namespace)) for namespace in (sys.modules, vars(builtins), self._sys, vars(os))]

    @contextlib.contextmanager
    def restored(self, **attributes: Any) -> Iterator[None]:
        """Restores the state, with the given attributes of ``sys``; at the end of the context, what the script left returns.

        Descriptors of standard streams that the script closed are occupied meanwhile: a file opened on one would get the text
        that is still in the stream's buffer when Python ends.
        """
        changes = [
            (namespace, {**saved, **(attributes if namespace is self._sys else {})}) for namespace, saved in self._saved
        ]
        undo: list[tuple[dict[str, Any], str, Any]] = []
        descriptors: list[int] = []
        try:
            for namespace, requested in changes:
                for name, value in requested.items():
                    if (current := namespace.get(name, _MISSING)) is not value:
                        namespace[name] = value
                        undo.append((namespace, name, current))
            descriptors = _take_standard_descriptors()
            yield
        finally:
            for fd in descriptors:
                os.close(fd)
            for namespace, name, left in reversed(undo):
                if left is _MISSING:
                    namespace.pop(name, None)
                else:
                    namespace[name] = left


def _take_standard_descriptors() -> list[int]:
    """Opens the null device on each standard descriptor that is closed; returns these."""
    descriptors: list[int] = []
    with contextlib.suppress(OSError):  # no more descriptors: then none will be opened either
        while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= _STANDARD:
            descriptors.append(fd)
        os.close(fd)
    return descriptors


# ---- Ranks of ``otel-torchprof run``: a launcher starts them as processes, each of which is recorded ----

TORCHRUN = "torch.distributed.run"
_ACCELERATE = "accelerate.commands.launch"
_PARSERS = {TORCHRUN: "get_args_parser", _ACCELERATE: "launch_command_parser"}
"""Modules of launchers, and the function of each that makes the parser of its options."""
_COMMANDS = {("torchrun",): TORCHRUN, ("accelerate", "launch"): _ACCELERATE}
"""Their commands."""
_NOT_FOR_RANKS = frozenset(("command", "explain", "kind", "nproc", "program", "report"))
"""Options of this command that ranks are not given."""
_NOT_RECORDED = {"no_python": "--no-python", "run_path": "--run-path"}
"""Options of launchers whose ranks cannot be recorded."""


class Launched:
    """A launcher that starts each rank under this command with the same options. The launcher itself is not recorded.

    Args:
        name: module of the launcher.
        words: its arguments.
        options: options of this command.

    Raises:
        TorchProfError, ValueError: the ranks cannot be started, or could not write their outputs.
        SystemExit: the launcher prints an error of its options, or ``--help``.
    """

    def __init__(self, name: str, words: Sequence[str], options: argparse.Namespace) -> None:
        self._options = options
        before, module, program = _split(name, words)
        stem = Program(program[0], "module" if module else "script").stem
        check_outputs(options, stem)
        as_module, as_module_of_ranks = ([], ["-m"]) if module else (["-m"], [])
        self.program = Program(name, "module")
        self.arguments = [
            *before,
            *as_module,
            "otel_torchprof",
            "run",
            *_words_of(options),
            *as_module_of_ranks,
            *program,
        ]
        self._names = file_names(options, stem)
        self._earlier_files: Mapping[str, int] = {}
        self._stderr = OwnStderr()

    def begin(self) -> None:
        """Notes which files exist before the launcher runs, whose module is then ``__main__`` alone."""
        # It was imported for its options, and runpy warns of a module that is there twice.
        sys.modules.pop(self.program.name, None)
        if self._options.explain or self._options.report:
            self._earlier_files = _changes(self._names[0])

    def end(self) -> None:
        """Explains the files that the ranks have written, and writes their report."""
        if self._options.explain or self._options.report:
            files = _changes(self._names[0])
            new = [path for path in files if files[path] != self._earlier_files.get(path)]
            self._stderr.write(printable_lines(_answers(of_last_attempt(new), self._options)))


def launched(options: argparse.Namespace, words: Sequence[str]) -> Launched | None:
    """The launcher that the command line names by its module, its command or ``--nproc``; None without one.

    Raises:
        TorchProfError, ValueError, SystemExit: as :class:`Launched`.
    """
    name, count = _launcher_in(options, words)
    if options.nproc is None:
        return Launched(name, words[count:], options) if name else None
    if name:
        raise TorchProfError(f"--nproc starts the ranks by itself: leave it out, or {shlex.join(words[:count])}")
    if options.kind == "code" or words[0] == "-":
        raise TorchProfError(
            "--nproc starts processes, each of which reads the script: name its file, or a module with -m"
        )
    module = ["-m"] if options.kind == "module" else []
    return Launched(TORCHRUN, ["--standalone", f"--nproc-per-node={options.nproc}", *module, *words], options)


def _launcher_in(options: argparse.Namespace, words: Sequence[str]) -> tuple[str, int]:
    """The launcher's module, and how many of the words name it; empty and 0 without a launcher."""
    if options.kind == "code":
        return "", 0
    if options.kind == "module":
        return (words[0], 1) if words[0] in _PARSERS else ("", 0)
    named = (Path(words[0]).name, *words[1:])  # by its path too
    matches = (item for item in _COMMANDS.items() if named[: len(item[0])] == item[0])
    command, name = next(matches, ((), ""))
    return name, len(command)


def explanation(files: Sequence[str], options: argparse.Namespace) -> str:
    """The text that ``--explain`` prints about the files."""
    from otel_torchprof._answers.verdicts import explain

    if not files:
        return "otel-torchprof: nothing was written that could be explained\n"
    try:
        with reading(list(files), quiet=options.quiet) as watch:
            return str(explain(*files, watch=watch))
    except TorchProfError as error:
        return f"otel-torchprof: {error}\n"


def _answers(files: Sequence[str], options: argparse.Namespace) -> str:
    """The texts of ``--explain`` and of ``--report``, which writes a page."""
    text = explanation(files, options) if options.explain else ""
    if not options.report or not files:
        return text or explanation(files, options)
    from otel_torchprof._profile.report_files import write_report

    try:
        with reading(list(files), quiet=options.quiet) as watch:
            lines = write_report(files, options.report, files, watch)
        lines.append(f"wrote {options.report}, for a browser")
    except TorchProfError as error:
        lines = [str(error)]
    return text + "".join(f"otel-torchprof: {line}\n" for line in lines)


def _split(name: str, words: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """The launcher's own words, whether ranks run a module, and the program of the ranks with its arguments."""
    try:
        parser = getattr(importlib.import_module(name), _PARSERS[name])()
    except ImportError as error:
        raise TorchProfError(f"ranks cannot be started: {error}; install what has {name}") from error
    parser.prog = name
    parsed = parser.parse_args(words)
    at = len(words) - len(parsed.training_script_args) - 1
    if words[at] == "--":  # after the script, from where argparse removes it
        at -= 1
    for option, text in _NOT_RECORDED.items():
        if getattr(parsed, option, False):
            raise TorchProfError(f"ranks that {name} starts with {text} cannot be recorded: leave it out")
    if words[at] != parsed.training_script:
        raise TorchProfError(f"cannot tell which of {shlex.join(words)!r} is the script: put -- before it")
    before = list(words[:at])
    if before[-1:] == ["--"]:
        before.pop()
    return before, bool(parsed.module), list(words[at:])


def _words_of(options: argparse.Namespace) -> list[str]:
    """The options of this command as words, for the ranks."""
    words: list[str] = []
    for name, value in vars(options).items():
        if name in _NOT_FOR_RANKS or value is None or value is False:
            continue
        option = f"--{name.replace('_', '-')}"
        values: list[Any] = value if isinstance(value, list) else [value]
        words += [option] if value is True else [f"{option}={item}" for item in values]
    return words


def _changes(name: str) -> dict[str, int]:
    """The existing files of all ranks, and the time of each one's last change, in ns."""
    paths = sorted(glob.glob(pattern_of_ranks(name)))  # noqa: PTH207 - names as they were typed
    return {path: Path(path).stat().st_mtime_ns for path in paths}


# ---- The black box of ``otel-torchprof run`` ----
# It is in memory that a watcher has open too, or in the folder that the environment names.

_ABOVE_STANDARD = 3


class _WatchedMemory(BoxFile):
    """Memory that the watcher has open too. ``top`` and ``dump`` read it by its descriptor, whose number a script may reuse."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._own = OwnDescriptor(descriptor)
        super().__init__(self._own.number, size, None)

    def close(self) -> None:
        """Closes it, if the script has not."""
        self._own.close()


class RunBox:
    """The black box of a script, if one is requested. If it cannot be made, one message says so and the script runs without it.

    Construct it before most of the package is imported and before there are threads: the constructor forks the watcher.
    """

    def __init__(self, options: argparse.Namespace, program: Program) -> None:
        self._box: BlackBox | None = None
        memory: BoxFile | None = None
        requested = options_of(options)
        if requested is None:
            return
        try:
            if not requested.directory:
                memory = _watched_memory(requested.size, box_name(options, program.stem))
        except (TorchProfError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            way_out = f"name a folder for it: {config.BLACK_BOX.variable}={requested.detail},/a/folder"
            say(f"no black box is kept: {reason}; {way_out}")
            return
        from otel_torchprof._files.box import BlackBox  # after the fork, so that the watcher has less memory

        name = "-c" if program.kind == "code" else Path(program.name).name  # sys.argv is not yet the script's
        identity = {**identity_in(os.environ), "program": name}
        self._box = BlackBox(requested, identity, memory)

    def start(self) -> None:
        """Records from now on."""
        if self._box is not None:
            self._box.start()

    def stop(self) -> None:
        """Closes the box, so that the watcher saves nothing. May be called repeatedly."""
        if self._box is not None:
            self._box.stop()


def options_of(options: argparse.Namespace) -> BlackBoxOptions | None:
    """Options of the box, from ``--blackbox`` and the environment; None if neither requests one."""
    configured: BlackBoxOptions | None = config.BLACK_BOX.read()
    if not config.ENABLED.read() or not (options.blackbox or configured):
        return None
    if not options.blackbox:
        return configured
    records_operators = options.stacks or options.detail in {None, "ops", "frames"}
    requested = BlackBoxOptions("ops" if records_operators else "steps")
    return requested if configured is None else configured._replace(detail=requested.detail)


def box_name(options: argparse.Namespace, stem: str) -> str:
    """Returns the path for the box of a script that dies: in the folder of the first output file, else in the working directory."""
    names = file_names(options, stem)
    folder = Path(own_path(names[0])).parent if names else Path()
    return str(folder / name_of_rank(f"{stem}{SUFFIX}", os.environ))


def _watched_memory(size: int | None, path: str) -> BoxFile:
    memory = memory_file(size)
    # If the process was started without standard streams, the memory would have the descriptor of one.
    descriptor = fcntl.fcntl(memory.descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE_STANDARD)
    memory.close()
    watched = _WatchedMemory(descriptor, memory.size)
    try:
        start_watcher(watched.descriptor, path)
    except OSError:
        watched.close()
        raise
    return watched


_DETAILS = [detail for detail in config.DETAILS if detail not in {"off", "metrics"}]
"""The levels of detail with spans."""
_LAST_SECONDS = 60.0
"""Time limit for sending and writing the rest at the end."""
_INTERRUPTED = 130
_STOPPED = "off: stopped"
_display = sys.__excepthook__

_DESCRIPTION = """\
Runs a script as "python SCRIPT" does, and writes a trace of the script and of torch while it runs, in constant memory. Options
before the script are those of this command, options after it are those of the script.

examples:
  otel-torchprof run train.py --epochs 3
  otel-torchprof run -o trace.json.gz --steps-per-file 100 --max-files 5 --table train.py
  otel-torchprof run --endpoint http://localhost:4317 -m package.train
  otel-torchprof run --schedule wait=10,active=2,repeat=3 train.py
  otel-torchprof run --nproc 4 --explain train.py
  otel-torchprof run --blackbox train.py
  otel-torchprof run torchrun --nproc-per-node 4 train.py"""


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "run",
        help="profile an unmodified script or, with -m, a module",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="otel-torchprof run [options] (SCRIPT | -m MODULE | -c CODE | -) [arguments of the script]",
    )
    add = parser.add_argument
    _add_program(add)
    add(
        "-o",
        "--output",
        metavar="FILE",
        action="append",
        help=f"output: {endings_help(TRACES)}; 'otlp' to send to --endpoint or OTEL_EXPORTER_OTLP_ENDPOINT, 'none' for no "
        "output; may be repeated (default: SCRIPT.trace.json.gz)",
    )
    add("--endpoint", metavar="URL", help="OTLP receiver to send to; without -o, no file is written")
    add("--detail", choices=_DETAILS, help="level of detail (default: ops)")
    add("--stacks", action="store_true", help="record Python calls; the same as --detail frames")
    add(
        "--schedule",
        metavar="wait=N,active=N",
        help="steps to trace in full, from step 0: wait=N,warmup=N,active=N,repeat=N",
    )
    for option in filter(lambda option: option.flag, config.OPTIONS):
        flag, _, value = option.flag.partition(" ")
        add(flag, **({"metavar": value} if value else {"action": "store_true"}), help=option.flag_help)
    add("--table", action="store_true", help="print averages by name at the end")
    add(
        "--sort",
        default="self_cpu_time_total",
        choices=SORT_KEYS,
        metavar="KEY",
        help="sort key of the table: " + ", ".join(SORT_KEYS),
    )
    add("--rows", type=int, default=20, metavar="N", help="rows of the table, -1 for all (default: 20)")
    add("--explain", action="store_true", help="report at the end why training is slow, from the written file")
    add(
        "--report",
        type=os.path.abspath,  # the script may change the folder
        metavar="PATH",
        help="write at the end an HTML page, from the written file: as otel-torchprof report",
    )
    add(
        "--blackbox",
        action="store_true",
        help="keep the latest events in memory that outlives the script; if it dies, save them to SCRIPT.otpbox, for recover",
    )
    add("-q", "--quiet", action="store_true", help="print problems only")
    add("program", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="script, module or code, and its arguments")


def _add_program(add: Callable[..., object]) -> None:
    add("-m", dest="kind", action="store_const", const="module", help="run a module, as python -m does")
    add("-c", dest="kind", action="store_const", const="code", help="run Python code, as python -c does")
    add(
        "--nproc",
        type=_process_count,
        metavar="N",
        help="number of ranks to run on this machine, started by torchrun; or auto, cpu or gpu, as for torchrun",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the script; returns 0, and raises what the script raises, including SystemExit.

    Raises:
        TorchProfError: the recording cannot begin.
    """
    words = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not words:
        raise TorchProfError("there is no script to run: name one, or a module with -m")
    try:
        running = launched(options, words) or _Recorded(options, words)
    except (TypeError, ValueError) as error:
        raise TorchProfError(str(error)) from error
    running.begin()
    options.script_runs = True
    program = running.program
    try:
        program.run(running.arguments)
    except NoProgramError as error:
        say(str(error))
        options.quiet = True
        return error.status
    except SystemExit:
        raise
    except BaseException as error:
        if isinstance(running, _Recorded):
            running.notice_failure(error)
        _show_without_us(error, program.trimmed(error.__traceback__))
        raise
    finally:
        running.end()
    return 0


def _process_count(text: str) -> str:
    if text in {"auto", "cpu", "gpu", "xpu"} or (text.isascii() and text.isdecimal() and int(text)):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is no number of processes: a whole number above 0, auto, cpu, gpu or xpu"
    )


class _Recorded:
    """A script and its recording.

    Of several ranks, rank 0 prints progress, the table and the names of its files; the others print problems only.
    """

    def __init__(self, options: argparse.Namespace, words: Sequence[str]) -> None:
        self.options = options
        self.program, self.arguments = Program(words[0], options.kind or "script"), words[1:]
        # As under `python SCRIPT`: by the name of this command, the system's one, readers of a box would take all threads for ours.
        name_thread(Path(sys.executable or "python").name)
        self._box = RunBox(options, self.program)  # forks: before the import below
        from otel_torchprof._answers.out_of_memory import notice_failure
        from otel_torchprof._instrument.streaming import stream  # most of the package; no other command needs it

        self.notice_failure = notice_failure
        """Called with the exception that the script raised."""

        self._pid = os.getpid()
        self._place = place_among_ranks(os.environ)
        self._speaks = self._place is None or self._place.rank == 0
        self._exporters = exporters_of(options, self.program.stem)
        detail: config.SpanDetail = "frames" if options.stacks else options.detail or "ops"
        self._stream = stream(
            *self._exporters,
            detail=detail,
            policy=policy_of(options, self._exporters),
            **config.of_flags(vars(options), config.arguments_in(config.LiveOptions)),
        )
        self._stderr = OwnStderr()
        self._progress = Progress(self._line, self._stderr)
        self._begin = time.monotonic()
        self._is_writing = False

    def begin(self) -> None:
        """Starts the recording."""
        self._begin = time.monotonic()
        self._box.start()
        self._stream.start()
        self._state = InterpreterState()
        if self._speaks and not self.options.quiet:
            self._progress.start()

    def end(self) -> None:
        """Ends the recording now or, if non-daemon threads of the script still run, after them.

        Errors here do not change the script's exit status; an interrupt by the user does.
        """
        try:
            with self._state.restored():
                is_child = os.getpid() != self._pid
                main = threading.main_thread()
                waits = any(not thread.daemon and thread is not main for thread in threading.enumerate())
                if waits and not is_child:
                    process_changes.before_exit(self._end)
        except Exception as error:  # noqa: BLE001 - the script may have changed anything that it needs
            self._say_why_not(error)
            return
        if not waits and not is_child:
            self._end()

    def _end(self) -> None:
        try:
            with self._state.restored(stderr=self._stderr):
                is_whole = os.getpid() != self._pid or self._stop()
        except Exception as error:  # noqa: BLE001 - likewise
            self._say_why_not(error)
            return
        if not is_whole:
            self._say("otel-torchprof: interrupted: what was still to be sent or written is lost\n")
            raise SystemExit(_INTERRUPTED)

    def _say_why_not(self, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._say(f"otel-torchprof: the recording was not ended as it should: {type(error).__name__}: {error}\n")

    def _stop(self) -> bool:
        """Stops the recording and prints the results; returns False if the user interrupted it before all was written."""
        self._is_writing = is_whole = True
        try:
            self._stream.stop(_LAST_SECONDS)
        except KeyboardInterrupt:  # the user does not wait for a receiver that is down
            is_whole = False
        finally:
            self._progress.stop()
            self._box.stop()
        if self._speaks:
            self._say_results()
        if not self.options.quiet:
            lines = self._summary() if self._speaks else self._problems()
            name = "" if self._speaks or self._place is None else f"rank {self._place.rank}: "
            self._say("".join(f"otel-torchprof: {name}{line}\n" for line in lines))
        return is_whole

    def _say_results(self) -> None:
        if self.options.table:
            from otel_torchprof._profile.events import printable_table  # stream has imported it

            rows = self._stream.key_averages()
            table = printable_table(rows, self.options.sort, self.options.rows) if rows else "nothing was recorded\n"
            self._say(table)
        if self.options.explain or self.options.report:
            self._say(self._answers_of_files())

    def _say(self, text: str) -> None:
        self._stderr.write(printable_lines(text))

    def _answers_of_files(self) -> str:
        text = _answers(
            next(files for exporter in self._exporters if (files := getattr(exporter, "files", None)) is not None),
            self.options,
        )
        if self._place is None:
            return text
        pattern = pattern_of_ranks(file_names(self.options, self.program.stem)[0])
        command = "explain" if self.options.explain else "report"
        return f"{text}otel-torchprof: this is of rank 0; when all have ended: otel-torchprof {command} {pattern}\n"

    def _line(self) -> str:
        health = self._stream.health
        waiting = sum(stats.waiting_spans for stats in health.exporters.values())
        what = f"writing, {waiting:,} spans to go (Ctrl-C to give up)" if self._is_writing else "recording"
        return f"otel-torchprof: {what}: {self._figures()}"

    def _losses(self) -> tuple[int, list[str]]:
        """The number of dropped events, and a text per output about spans that were not delivered."""
        health = self._stream.health
        unsent = [
            f"{lost:,} spans not delivered to {_place(exporter)}"
            for exporter, stats in zip(self._exporters, health.exporters.values(), strict=True)
            if (lost := stats.dropped_spans + stats.failed_spans)
        ]
        return sum(health.dropped.values()), unsent

    def _figures(self) -> str:
        lost, unsent = self._losses()
        written = sum(getattr(exporter, "bytes_written", 0) for exporter in self._exporters)
        parts = [
            duration(time.monotonic() - self._begin),
            f"{self._stream.steps:,} steps",
            f"{self._stream.health.recorded:,} events",
            f"{lost:,} dropped",
            *unsent,
            *([f"{size(written)} written"] if written else []),
        ]
        return ", ".join(parts)

    def _summary(self) -> list[str]:
        from otel_torchprof._export.otlp import OTLPExporter

        lines = [self._figures()]
        for exporter in self._exporters:
            files = getattr(exporter, "files", None)
            if files:
                of_ranks = (
                    f"; this is rank 0 of {self._place.world_size}, and each writes its own" if self._place else ""
                )
                series = f" to {files[-1]} ({len(files)} files)" if len(files) > 1 else ""
                lines.append(f"wrote {files[0]}{series}{of_ranks}")
            elif isinstance(exporter, OTLPExporter):
                lines.append(f"sent {exporter.stats.accepted_spans:,} spans to {exporter.displayed_endpoint}")
        if not self._stream.health.recorded:
            lines.append(
                "nothing was recorded in this process; child processes are not recorded, but ranks are: with --nproc N, "
                "torchrun or accelerate launch"
            )
        health = self._stream.health
        for name, state in health.sources.items():
            if name in {"operators", "frames", "devices"} and state != ON and "detail is" not in state:
                lines.append(f"{name} {state}")
        return [*lines, *self._why_nothing(), *health.notes]

    def _problems(self) -> list[str]:
        """The lines that a rank other than 0 prints. What is off is usually off on all ranks, and rank 0 prints it."""
        return [*([self._figures()] if any(self._losses()) else []), *self._why_nothing()]

    def _why_nothing(self) -> list[str]:
        state = self._stream.health.sources.get("recording", _STOPPED)
        return [] if state == _STOPPED else [f"nothing was recorded, {state}"]


def _place(exporter: Any) -> str:
    """The endpoint or file of an exporter, for a message."""
    return getattr(exporter, "displayed_endpoint", "") or next(iter(getattr(exporter, "files", ())), "a file")


def _show_without_us(error: BaseException, own: types.TracebackType | None) -> None:
    """Has Python print the error of a script without the frames of this package; the error itself still propagates."""
    hook = getattr(sys, "excepthook", _display)
    prefix = "" if hasattr(sys, "excepthook") else "sys.excepthook is missing\n"

    def show(kind: type[BaseException], value: BaseException, traceback: types.TracebackType | None) -> None:
        if value is error:
            traceback = own
            value.__traceback__ = own
        try:
            if prefix:
                sys.stderr.write(prefix)
            hook(kind, value, traceback)
        except SystemExit:
            raise
        except BaseException as second:  # noqa: BLE001 - shown as Python does, but without this frame
            outer = second.__traceback__
            sys.stderr.write("Error in sys.excepthook:\n")
            _display(type(second), second.with_traceback(outer and outer.tb_next), outer and outer.tb_next)
            sys.stderr.write("\nOriginal exception was:\n")
            _display(kind, value, traceback)

    sys.excepthook = show
