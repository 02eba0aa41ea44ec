"""A program, run as ``python`` itself would run it, in a process that is already there."""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import linecache
import marshal
import os
import pkgutil
import re
import sys
import textwrap
import tokenize
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from otel_torchprof.errors import TorchProfError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAIN, _MAIN_OF_CHILDREN = "__main__", "__mp_main__"
_OWN, _SITE = "otel_torchprof", "site"
_OWN_MODULE = re.compile(rf"(-\w*?)m{_OWN}(\.{_MAIN})?")
_STDIN, _COMMAND = "<stdin>", "<string>"
"""Python's file names for code from stdin and from ``-c``."""
_BYTECODE_HEADER = 16
_CANNOT_OPEN = 2
"""Exit status of Python if it cannot open the script."""

Kind = Literal["script", "module", "code"]


class NoProgramError(TorchProfError):
    """There is no program to run. The text and the exit status are Python's own."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(eq=False)
class Program:
    """The program that ``python PATH``, ``python -m NAME`` or ``python -c CODE`` would run; the path ``-`` is standard input."""

    name: str
    kind: Kind = "script"

    @property
    def stem(self) -> str:
        """The beginning of the names of output files."""
        if self.kind == "module":
            return self.name
        if self.kind == "code":
            return "program"
        base = os.path.basename(os.path.normpath(self.name))  # noqa: PTH119 - "." and "dir/" have names too
        return base.partition(".")[0].strip("-") or "program"

    def run(self, arguments: Sequence[str]) -> None:
        """Runs the main module to its end, with its own ``sys.argv`` and ``sys.path[0]``; it stays ``__main__`` afterwards.

        Raises:
            NoProgramError: there is no such program.
            BaseException: raised by the program; :meth:`trimmed` cuts its traceback.
        """
        option = {"module": "-m", "code": "-c", "script": None}[self.kind]
        words = [self.name, *arguments]
        _replace_command([option, *words] if option else words)
        sys.argv[:] = [option or self.name, *arguments]
        main = types.ModuleType(_MAIN)
        main.__dict__.update(__builtins__=builtins, __loader__=importlib.machinery.BuiltinImporter)
        if sys.version_info < (3, 14):  # from 3.14 on, they are made on access
            main.__dict__.update(__annotations__={})
        # Code of the former __main__ is still running: a reference keeps the module from being torn down.
        self._replaced = sys.modules.get(_MAIN)
        sys.modules[_MAIN] = main
        if _MAIN_OF_CHILDREN in sys.modules:  # multiprocessing has been imported, with the module that was __main__
            sys.modules[_MAIN_OF_CHILDREN] = main
        if self.kind == "script":
            _run_script(self.name, main.__dict__)
        elif self.kind == "module":
            _put_first(os.getcwd())  # noqa: PTH109
            _run_module(self.name, takes_argv=True)
        else:
            _put_first("")
            _run_command(self.name, main.__dict__)

    def trimmed(self, traceback: types.TracebackType | None) -> types.TracebackType | None:
        """The part of a traceback that Python would show had it run the program itself."""
        while traceback is not None and traceback.tb_frame.f_globals is not globals():
            traceback = traceback.tb_next
        while traceback is not None and traceback.tb_frame.f_globals is globals():
            traceback = traceback.tb_next
        return traceback


def _run_script(name: str, variables: dict[str, Any]) -> None:
    path, loader = _STDIN, variables["__loader__"]
    if name == "-":
        _put_first("")
        source = b"" if sys.stdin is None else sys.stdin.buffer.read()
        code = _compiled(source, path)
    else:
        path = name if os.path.isabs(name) else os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH117, PTH118 - dots stay
        if pkgutil.get_importer(path) is not None:  # a folder or an archive
            _put_first(path, also_safe=True)
            _run_module(_MAIN, takes_argv=False)
            return
        _put_first(_folder_of(path))
        try:
            code, loader = _read(path)
        except OSError as error:
            text = (
                f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}; name a script, or a module with -m"
            )
            raise NoProgramError(text, _CANNOT_OPEN) from None
    variables.update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, variables)  # noqa: S102 - runs the user's script
    for name_of_file in ("__file__", "__cached__"):  # as Python does before exit handlers run
        variables.pop(name_of_file, None)


def _run_module(name: str, *, takes_argv: bool) -> None:
    import runpy

    run = runpy._run_module_as_main  # type: ignore[attr-defined]  # noqa: SLF001 - what Python itself calls for -m
    try:
        run(name, takes_argv)
    except SystemExit as error:
        inner = error.__traceback__ and error.__traceback__.tb_next
        if inner is None or inner.tb_frame.f_code is not run.__code__ or inner.tb_next is not None:
            raise
        raise NoProgramError(str(error.code).removeprefix(f"{sys.executable}: "), 1) from None


def _run_command(text: str, variables: dict[str, Any]) -> None:
    if sys.version_info >= (3, 14):
        text = textwrap.dedent(text)
    code = compile(text, _COMMAND, "exec", dont_inherit=True)
    if (register := getattr(linecache, "_register_code", None)) is not None:  # tracebacks have its lines, since 3.13
        register(code if hasattr(linecache, "_interactive_cache") else _COMMAND, text, _COMMAND)  # the latter in 3.13.0
    exec(code, variables)  # noqa: S102 - likewise


def _replace_command(words: list[str]) -> None:
    """Takes this command out of ``sys.orig_argv``; the interpreter's own options stay."""
    count = len(sys.argv) - 1
    if not count or sys.orig_argv[-count:] != sys.argv[1:]:  # the command was called by other code
        return
    *before, last = sys.orig_argv[:-count]
    if before and (match := _OWN_MODULE.fullmatch(before[-1] + last) or _OWN_MODULE.fullmatch(last)):
        if not _OWN_MODULE.fullmatch(last):
            before.pop()
        before += [match[1]] if match[1] != "-" else []  # -I of -Im
    sys.orig_argv[:] = [*before, *words]


def _read(path: str) -> tuple[types.CodeType, Any]:
    """The code of a source or bytecode file, and its loader."""
    with io.open_code(path) as file:
        content = file.read()
    magic = importlib.util.MAGIC_NUMBER
    if not path.endswith(tuple(importlib.machinery.BYTECODE_SUFFIXES)) and not content.startswith(magic):
        return _compiled(content, path), importlib.machinery.SourceFileLoader(_MAIN, path)
    if not content.startswith(magic):
        raise RuntimeError("Bad magic number in .pyc file")
    code: types.CodeType = marshal.loads(content[_BYTECODE_HEADER:])  # noqa: S302 - as Python does
    return code, importlib.machinery.SourcelessFileLoader(_MAIN, path)


def _compiled(source: bytes, path: str) -> types.CodeType:
    _check_encoding(source, path)
    code: types.CodeType = compile(source, path, "exec", dont_inherit=True)
    return code


def _check_encoding(source: bytes, path: str) -> None:
    """Raises SyntaxError for bytes that Python refuses in a file although ``compile`` accepts them."""
    with contextlib.suppress(SyntaxError):  # for an unknown encoding, compile has the better message
        if not tokenize.detect_encoding(io.BytesIO(source).readline)[0].startswith("utf-8"):
            return
    try:
        source.decode()
    except UnicodeDecodeError as error:
        line, byte = source.count(b"\n", 0, error.start) + 1, f"\\x{source[error.start]:02x}"
        message = (
            f"Non-UTF-8 code starting with '{byte}' in file {path} on line {line}, but no encoding declared; "
            "see https://peps.python.org/pep-0263/ for details"
        )
        if sys.version_info < (3, 14):
            raise SyntaxError(message) from None
        before = source[source.rfind(b"\n", 0, error.start) + 1 : error.start]
        text = (before + source[error.start :].splitlines()[0]).decode(errors="replace")
        place = len(before.decode()) + 1
        raise SyntaxError(message, (path, line, place, text, line, place)) from None


def _folder_of(path: str) -> str:
    try:
        return os.path.dirname(os.path.realpath(path, strict=True))  # noqa: PTH120
    except OSError:  # a pipe, as of <(...)
        return os.path.dirname(path)  # noqa: PTH120


def _put_first(folder: str, *, also_safe: bool = False) -> None:
    """Replaces the folder of this command in ``sys.path[0]``. With ``-P`` or ``-I`` Python put none there, and none is added.

    Args:
        folder: the new first entry.
        also_safe: with ``-P`` or ``-I``, insert it nevertheless, as Python does for a folder or an archive.
    """
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = folder
    elif also_safe:
        sys.path.insert(0, folder)
    else:
        return
    _make_room(folder)


def _make_room(folder: str) -> None:
    """Removes from ``sys.modules`` modules imported for this package whose names the program's folder has too."""
    names = list(sys.modules)
    if _SITE not in names:
        return
    # In the order of imports; site is the last module that the interpreter itself imports.
    at = names.index(_SITE) + 1
    for name in {module.partition(".")[0] for module in names[at:]} - {*names[:at], *sys.builtin_module_names, _OWN}:
        own = importlib.machinery.PathFinder.find_spec(name, [folder or os.getcwd()])  # noqa: PTH109
        if own is None or own.loader is None or importlib.machinery.FrozenImporter.find_spec(name) is not None:
            continue
        known = getattr(sys.modules.get(name), "__spec__", None)
        if known is None or os.path.realpath(known.origin or "") == os.path.realpath(own.origin or ""):
            continue
        # Submodules go only if the program's own is a package: running functions may still import from the others.
        is_package = own.submodule_search_locations is not None
        submodules = [module for module in names if is_package and module.startswith(f"{name}.")]
        for module in (name, *submodules):
            sys.modules.pop(module, None)
