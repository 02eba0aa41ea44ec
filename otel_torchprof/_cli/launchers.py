"""Ranks of ``otel-torchprof run``: launchers start them as processes, and each is to be recorded."""

from __future__ import annotations

import glob
import importlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof._process.printable import printable_lines
from otel_torchprof.errors import TorchProfError

from .progress import reading
from .run_outputs import check_outputs, file_names, of_last_attempt, pattern_of_ranks
from .run_program import Program
from .terminal import OwnStderr

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

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
    from otel_torchprof._explain.verdicts import explain

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
