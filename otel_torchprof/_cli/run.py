"""``otel-torchprof run``: a script profiled without touching it."""

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
from otel_torchprof._export.formats import endings_help
from otel_torchprof._files.box_file import SUFFIX, BoxFile, memory_file
from otel_torchprof._process import process_changes
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


# ---- What a script may take away from the interpreter, put back while our code runs at the end ----

_MISSING: Any = object()
_STANDARD = 2
"""The last of the descriptors of stdin, stdout and stderr."""


class InterpreterState:
    """Modules, builtins and the attributes of ``sys`` and ``os`` at one moment."""

    def __init__(self) -> None:
        self._sys = vars(sys)
        self._kept = [(kept, dict(kept)) for kept in (sys.modules, vars(builtins), self._sys, vars(os))]

    @contextlib.contextmanager
    def restored(self, **attributes: Any) -> Iterator[None]:
        """As they were, and attributes of ``sys`` as given; afterwards what was changed is as the script left it.

        What is opened meanwhile gets no descriptor of a standard stream that the script closed: text that waits in the
        stream's buffer would go there when Python ends.
        """
        changes = [(kept, {**saved, **(attributes if kept is self._sys else {})}) for kept, saved in self._kept]
        undo: list[tuple[dict[str, Any], str, Any]] = []
        taken: list[int] = []
        try:
            for kept, requested in changes:
                for name, value in requested.items():
                    if (found := kept.get(name, _MISSING)) is not value:
                        kept[name] = value
                        undo.append((kept, name, found))
            taken = _take_standard_descriptors()
            yield
        finally:
            for fd in taken:
                os.close(fd)
            for kept, name, found in reversed(undo):
                if found is _MISSING:
                    kept.pop(name, None)
                else:
                    kept[name] = found


def _take_standard_descriptors() -> list[int]:
    """Opens those that are closed."""
    taken: list[int] = []
    with contextlib.suppress(OSError):  # no more descriptors: then none will be opened either
        while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= _STANDARD:
            taken.append(fd)
        os.close(fd)
    return taken


# ---- Ranks of ``otel-torchprof run``: launchers start them as processes, and each is to be recorded ----

TORCHRUN = "torch.distributed.run"
_ACCELERATE = "accelerate.commands.launch"
_PARSERS = {TORCHRUN: "get_args_parser", _ACCELERATE: "launch_command_parser"}
"""Launchers by the names of their modules, and what makes the parser of their options."""
_COMMANDS = {("torchrun",): TORCHRUN, ("accelerate", "launch"): _ACCELERATE}
"""The same by the commands as which they are installed."""
_OF_LAUNCHED = frozenset(("command", "explain", "kind", "nproc", "program"))
"""What the ranks are not given."""
_NOT_RECORDED = {"no_python": "--no-python", "run_path": "--run-path"}
"""Options of launchers with which ranks are started in a way that this command cannot stand in."""


class Launched:
    """A launcher, which starts the ranks each under this command with the same options. Itself it is not recorded.

    Args:
        name: of the launcher's module.
        words: what it was given.
        options: of this command.

    Raises:
        TorchProfError, ValueError: the ranks cannot be started, or could not write what they are to.
        SystemExit: the launcher's own answer to a wrong option, or to ``--help``.
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
        self._found_before: Mapping[str, int] = {}
        self._stderr = OwnStderr()

    def begin(self) -> None:
        """Before the launcher runs."""
        if self._options.explain:
            self._found_before = _changes(self._names[0])

    def end(self) -> None:
        """After it: explains what the ranks have written."""
        if self._options.explain:
            found = _changes(self._names[0])
            new = [path for path in found if found[path] != self._found_before.get(path)]
            self._stderr.write(printable_lines(explanation(of_last_attempt(new), self._options)))


def launched(options: argparse.Namespace, words: Sequence[str]) -> Launched | None:
    """The launcher that the command line names, by its module or command or with ``--nproc``; None where there is none.

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
    """The launcher's module, and how many of the words name it; empty where there is none."""
    if options.kind == "code":
        return "", 0
    if options.kind == "module":
        return (words[0], 1) if words[0] in _PARSERS else ("", 0)
    named = (Path(words[0]).name, *words[1:])  # by its path too
    found = (item for item in _COMMANDS.items() if named[: len(item[0])] == item[0])
    command, name = next(found, ((), ""))
    return name, len(command)


def explanation(files: Sequence[str], options: argparse.Namespace) -> str:
    """What ``--explain`` says of files."""
    from otel_torchprof._answers.verdicts import explain

    if not files:
        return "otel-torchprof: nothing was written that could be explained\n"
    try:
        with reading(list(files), quiet=options.quiet) as watch:
            return str(explain(*files, watch=watch))
    except TorchProfError as error:
        return f"otel-torchprof: {error}\n"


def _split(name: str, words: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """The launcher's own words, whether ranks run a module, and the program of the ranks with its arguments."""
    try:
        parser = getattr(importlib.import_module(name), _PARSERS[name])()
    except ImportError as error:
        raise TorchProfError(f"ranks cannot be started: {error}; install what has {name}") from error
    parser.prog = name
    found = parser.parse_args(words)
    at = len(words) - len(found.training_script_args) - 1
    if words[at] == "--":  # after the script, from where argparse removes it
        at -= 1
    for option, text in _NOT_RECORDED.items():
        if getattr(found, option, False):
            raise TorchProfError(f"ranks that {name} starts with {text} cannot be recorded: leave it out")
    if words[at] != found.training_script:
        raise TorchProfError(f"cannot tell which of {shlex.join(words)!r} is the script: put -- before it")
    before = list(words[:at])
    if before[-1:] == ["--"]:
        before.pop()
    return before, bool(found.module), list(words[at:])


def _words_of(options: argparse.Namespace) -> list[str]:
    """The options of this command as words, for the ranks."""
    found: list[str] = []
    for name, value in vars(options).items():
        if name in _OF_LAUNCHED or value is None or value is False:
            continue
        option = f"--{name.replace('_', '-')}"
        values: list[Any] = value if isinstance(value, list) else [value]
        found += [option] if value is True else [f"{option}={each}" for each in values]
    return found


def _changes(name: str) -> dict[str, int]:
    """The files of all ranks that are there, with when each was changed."""
    paths = sorted(glob.glob(pattern_of_ranks(name)))  # noqa: PTH207 - names as they were typed
    return {path: Path(path).stat().st_mtime_ns for path in paths}


# ---- The black box of ``otel-torchprof run`` ----
# In memory that a watcher has open too, or in the folder that the environment names.

_ABOVE_STANDARD = 3


class _WatchedMemory(BoxFile):
    """Memory that the watcher has open. Here its descriptor closes once it is mapped: later the number may be the script's."""

    __slots__ = ()

    def close(self) -> None:
        """Without effect."""


class RunBox:
    """The box of a script, if one is requested. What goes wrong with it is said once, and the script runs without.

    Construct it before most of the package is imported, and before there are threads: the watcher is forked here.
    """

    def __init__(self, options: argparse.Namespace, program: Program) -> None:
        self._box: BlackBox | None = None
        self._memory: BoxFile | None = None
        requested = options_of(options)
        if requested is None:
            return
        try:
            if not requested.directory:
                self._memory = _watched_memory(requested.size, box_name(options, program.stem))
        except (TorchProfError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            way_out = f"name a folder for it: {config.BLACK_BOX.variable}={requested.detail},/a/folder"
            say(f"no black box is kept: {reason}; {way_out}")
            return
        from otel_torchprof._files.box import BlackBox  # imports more than the watcher should have to copy

        name = "-c" if program.kind == "code" else Path(program.name).name  # sys.argv is not yet the script's
        identity = {**identity_in(os.environ), "program": name}
        self._box = BlackBox(requested, identity, self._memory)

    def start(self) -> None:
        """Records from now on."""
        if self._box is not None:
            self._box.start()
        if self._memory is not None:
            os.close(self._memory.descriptor)
            self._memory = None

    def stop(self) -> None:
        """Ends the box; the watcher ends with the process then, and saves nothing. Again without effect."""
        if self._box is not None:
            self._box.stop()


def options_of(options: argparse.Namespace) -> BlackBoxOptions | None:
    """What the box records and where it lies, by ``--blackbox`` and by the environment; None where neither requests one."""
    found: BlackBoxOptions | None = config.BLACK_BOX.read()
    if not config.ENABLED.read() or not (options.blackbox or found):
        return None
    if not options.blackbox:
        return found
    records_operators = options.stacks or options.detail in {None, "ops", "frames"}
    requested = BlackBoxOptions("ops" if records_operators else "steps")
    return requested if found is None else found._replace(detail=requested.detail)


def box_name(options: argparse.Namespace, stem: str) -> str:
    """Where the box of a script that dies is saved: beside the first file that is written, else in the working directory."""
    names = file_names(options, stem)
    folder = Path(own_path(names[0])).parent if names else Path()
    return str(folder / name_of_rank(f"{stem}{SUFFIX}", os.environ))


def _watched_memory(size: int | None, path: str) -> BoxFile:
    made = memory_file(size)
    # The process may have been started without standard streams, whose numbers it would get.
    descriptor = fcntl.fcntl(made.descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE_STANDARD)
    made.close()
    start_watcher(descriptor, path)
    return _WatchedMemory(descriptor, made.size, None)


_DETAILS = [detail for detail in config.DETAILS if detail not in {"off", "metrics"}]
"""Those that make spans."""
_LAST_SECONDS = 60.0
"""What sending and writing the rest may take at the end."""
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
        help=f"output: {endings_help()}; 'otlp' to send to --endpoint or OTEL_EXPORTER_OTLP_ENDPOINT, 'none' for no "
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
    """Runs the script; returns 0, and raises what it raises, its SystemExit among that.

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
    """A script, and the recording around it.

    Of several ranks rank 0 is the one that shows progress, a table and where it wrote; the others say only what is wrong.
    """

    def __init__(self, options: argparse.Namespace, words: Sequence[str]) -> None:
        self.options = options
        self.program, self.arguments = Program(words[0], options.kind or "script"), words[1:]
        self._box = RunBox(options, self.program)  # forks: before what follows is imported
        from otel_torchprof._instrument.streaming import stream  # most of the package, which no other command needs

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
        """From now on."""
        self._begin = time.monotonic()
        self._box.start()
        self._stream.start()
        self._state = InterpreterState()
        if self._speaks and not self.options.quiet:
            self._progress.start()

    def end(self) -> None:
        """Ends it now; where threads of the script continue, which Python waits for, after them.

        Whatever that comes upon, the script's exit status stays, but where the user interrupts it.
        """
        try:
            with self._state.restored():
                is_child = os.getpid() != self._pid
                waits = any(not each.daemon and each is not threading.main_thread() for each in threading.enumerate())
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
        """Whether all was sent and written before the user had enough of waiting."""
        self._is_writing = is_whole = True
        try:
            self._stream.stop(_LAST_SECONDS)
        except KeyboardInterrupt:  # whoever does not want to wait for a receiver that is down
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
        if self.options.explain:
            self._say(self._explanation())

    def _say(self, text: str) -> None:
        self._stderr.write(printable_lines(text))

    def _explanation(self) -> str:
        text = explanation(
            next(files for each in self._exporters if (files := getattr(each, "files", None)) is not None), self.options
        )
        if self._place is None:
            return text
        pattern = pattern_of_ranks(file_names(self.options, self.program.stem)[0])
        return f"{text}otel-torchprof: this is of rank 0; when all have ended: otel-torchprof explain {pattern}\n"

    def _line(self) -> str:
        health = self._stream.health
        waiting = sum(stats.waiting_spans for stats in health.exporters.values())
        what = f"writing, {waiting:,} spans to go (Ctrl-C to give up)" if self._is_writing else "recording"
        return f"otel-torchprof: {what}: {self._figures()}"

    def _losses(self) -> tuple[int, list[str]]:
        """Events that were dropped, and the spans that were not delivered, by place."""
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
        """What a rank says that is not the first: what is off is off on all of them, as a rule, and the first says it."""
        return [*([self._figures()] if any(self._losses()) else []), *self._why_nothing()]

    def _why_nothing(self) -> list[str]:
        state = self._stream.health.sources.get("recording", _STOPPED)
        return [] if state == _STOPPED else [f"nothing was recorded, {state}"]


def _place(exporter: Any) -> str:
    """Where it sends or writes to, for a message."""
    return getattr(exporter, "displayed_endpoint", "") or next(iter(getattr(exporter, "files", ())), "a file")


def _show_without_us(error: BaseException, own: types.TracebackType | None) -> None:
    """Has Python show the error as if the script had been started by Python; it continues through the command, for its exit status."""
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
