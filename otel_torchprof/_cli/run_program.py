"""A program, run as ``python`` itself would run it, in a process that is already there."""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import sys
import tokenize
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from otel_torchprof.errors import TorchProfError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAIN = "__main__"


class NoProgramError(TorchProfError):
    """There is nothing to run; the text is what Python itself says of it."""


@dataclass(eq=False)
class Program:
    """What ``python PATH`` or ``python -m NAME`` would run."""

    name: str
    is_module: bool = False
    """``name`` is that of a module, not a path."""
    _code: types.CodeType | None = None

    @property
    def stem(self) -> str:
        """What to name files after."""
        if self.is_module:
            return self.name
        base = os.path.basename(os.path.normpath(self.name))  # noqa: PTH119 - "." and "dir/" have names too
        return base.partition(".")[0] or "program"

    def run(self, arguments: Sequence[str]) -> None:
        """Runs it to the end of its main module, which stays ``__main__``; with its own ``sys.argv`` and ``sys.path[0]``.

        Raises:
            NoProgramError: there is none.
            BaseException: whatever the program raises; :meth:`trimmed` has its traceback.
        """
        sys.argv[:] = [self.name, *arguments]
        main, self._code = self._module() if self.is_module else self._script()
        if sys.version_info < (3, 14):  # since then they are made where somebody asks for them
            main.__dict__.setdefault("__annotations__", {})
        main.__dict__["__builtins__"] = builtins
        # What runs now continues: the module that was __main__ must not be torn down.
        self._replaced = sys.modules.get(_MAIN)
        sys.modules[_MAIN] = main
        exec(self._code, main.__dict__)  # noqa: S102 - that is what it is for

    def trimmed(self, traceback: types.TracebackType | None) -> types.TracebackType | None:
        """The part of a traceback that is the program's own."""
        while traceback is not None and traceback.tb_frame.f_code is not self._code:
            traceback = traceback.tb_next
        return traceback

    def _script(self) -> tuple[types.ModuleType, types.CodeType]:
        import zipfile  # brings the modules of four compressions, which no other command needs

        if os.path.isdir(self.name) or (  # noqa: PTH112 - as it was typed
            os.path.isfile(self.name) and zipfile.is_zipfile(self.name)  # noqa: PTH113
        ):
            return self._folder()
        path = self.name
        if not os.path.isabs(path):  # noqa: PTH117
            path = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - dots stay, as in Python's own
        _put_first(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
        loader = _loader(path)
        try:
            code = _code_of(path, loader)
        except OSError as error:
            raise NoProgramError(
                f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}; name a script, or a module with -m"
            ) from None
        return _new_main(__file__=path, __cached__=None, __loader__=loader, __package__=None, __spec__=None), code

    def _folder(self) -> tuple[types.ModuleType, types.CodeType]:
        """A folder or archive with a ``__main__.py``."""
        _put_first(self.name, also_safe=True)
        spec = importlib.machinery.PathFinder.find_spec(_MAIN, [self.name])
        if spec is None or spec.loader is None:
            raise NoProgramError(f"can't find {_MAIN!r} module in {self.name!r}")
        return self._of_spec(spec)

    def _module(self) -> tuple[types.ModuleType, types.CodeType]:
        sys.argv[0] = "-m"
        _put_first(os.getcwd())  # noqa: PTH109
        spec = _found(self.name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _found(f"{self.name}.{_MAIN}")
            if spec is None:
                raise NoProgramError(
                    f"No module named {self.name}.{_MAIN}; {self.name!r} is a package and cannot be run"
                )
        if spec is None:
            raise NoProgramError(f"No module named {self.name}")
        found = self._of_spec(spec)
        sys.argv[0] = spec.origin or self.name
        return found

    @staticmethod
    def _of_spec(spec: importlib.machinery.ModuleSpec) -> tuple[types.ModuleType, types.CodeType]:
        loader: Any = spec.loader
        code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
        if code is None:
            raise NoProgramError(f"No code object available for {spec.name}")
        main = _new_main(
            __file__=spec.origin, __cached__=spec.cached, __loader__=loader, __package__=spec.parent, __spec__=spec
        )
        return main, code


def _found(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise NoProgramError(f"Error while finding module specification for {name!r} ({error})") from error


def _loader(path: str) -> Any:
    kind: Any = importlib.machinery.SourceFileLoader
    if path.endswith(tuple(importlib.machinery.BYTECODE_SUFFIXES)):
        kind = importlib.machinery.SourcelessFileLoader
    return kind(_MAIN, path)


def _code_of(path: str, loader: Any) -> types.CodeType:
    if isinstance(loader, importlib.machinery.SourcelessFileLoader):
        compiled: types.CodeType = loader.get_code(_MAIN)  # type: ignore[assignment]
        return compiled
    with io.open_code(path) as file:
        source = file.read()
    _check_encoding(source, path)
    found: types.CodeType = compile(source, path, "exec", dont_inherit=True)
    return found


def _check_encoding(source: bytes, path: str) -> None:
    """Raises SyntaxError for what Python refuses in a file, and ``compile`` takes."""
    with contextlib.suppress(SyntaxError):  # of an encoding that there is not, compile says more
        if not tokenize.detect_encoding(io.BytesIO(source).readline)[0].startswith("utf-8"):
            return
    try:
        source.decode()
    except UnicodeDecodeError as error:
        line, byte = source.count(b"\n", 0, error.start) + 1, f"\\x{source[error.start]:02x}"
        said = (
            f"Non-UTF-8 code starting with '{byte}' in file {path} on line {line}, but no encoding declared; "
            "see https://peps.python.org/pep-0263/ for details"
        )
        if sys.version_info < (3, 14):
            raise SyntaxError(said) from None
        before = source[source.rfind(b"\n", 0, error.start) + 1 : error.start]
        text = (before + source[error.start :].splitlines()[0]).decode(errors="replace")
        place = len(before.decode()) + 1
        raise SyntaxError(said, (path, line, place, text, line, place)) from None


def _new_main(**attributes: Any) -> types.ModuleType:
    main = types.ModuleType(_MAIN)
    main.__dict__.update(attributes)
    return main


def _put_first(folder: str, *, also_safe: bool = False) -> None:
    """In place of the folder of this command, which Python put there; where it was told not to (``-P``), nothing is."""
    if getattr(sys.flags, "safe_path", False):
        if also_safe:
            sys.path.insert(0, folder)
        return
    sys.path[0] = folder
