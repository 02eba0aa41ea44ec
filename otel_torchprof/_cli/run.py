"""``otel-torchprof run``: a script profiled without touching it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof._encode.table import SORT_KEYS
from otel_torchprof._process import process_changes
from otel_torchprof._process.printable import printable_lines
from otel_torchprof.errors import TorchProfError
from otel_torchprof.health import ON

from .interpreter_state import InterpreterState
from .launchers import explanation, launched
from .progress import Progress, duration, size
from .run_box import RunBox
from .run_outputs import exporters_of, file_names, pattern_of_ranks, place_among_ranks, policy_of
from .run_program import NoProgramError, Program
from .terminal import OwnStderr, say

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence

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
        help="output: .json or .json.gz for Perfetto, .otlp or .jsonl for OpenTelemetry, 'otlp' to send to --endpoint or "
        "OTEL_EXPORTER_OTLP_ENDPOINT, 'none' for no output; may be repeated (default: SCRIPT.trace.json.gz)",
    )
    add("--endpoint", metavar="URL", help="OTLP receiver to send to; without -o, no file is written")
    add("--detail", choices=_DETAILS, help="level of detail (default: ops)")
    add("--shapes", action="store_true", help="record the input shapes of operators")
    add("--stacks", action="store_true", help="record Python calls; the same as --detail frames")
    add("--device", metavar="TYPE", help="type of device on which operators are timed, such as cuda")
    add(
        "--schedule",
        metavar="wait=N,active=N",
        help="steps to trace in full, from step 0: wait=N,warmup=N,active=N,repeat=N",
    )
    add("--every", metavar="N", help="trace only every n-th step in full")
    add(
        "--keep",
        metavar="WHICH",
        help="detail to send or write as OTLP: 'all', or 'slow' and failed steps only (default: slow if spans are sent and no policy is set)",
    )
    add("--max-bytes", metavar="SIZE", help="start the next Chrome file at this size, such as 500M")
    add("--steps-per-file", metavar="N", help="start the next Chrome file after this number of steps")
    add("--max-files", metavar="N", help="number of latest Chrome files to keep")
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
            record_shapes=options.shapes,
            use_device=options.device,
            policy=policy_of(options, self._exporters),
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
            from otel_torchprof._events.averages_list import printable_table  # stream has imported it

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
