"""Programs in processes of their own, forked from one that has torch imported: importing it takes longer than most of them.

So does importing what the first optimizer of a program imports, torch's compiler: that is there, too.

For programs that import torch anyway, and for which it does not matter before what else: those whose subject is how an interpreter
starts or ends, with all destructors, or what is imported first, need one that is started for them (``subprocess.run``).
Of this package nothing is there, unless the program says that it may be: importing that takes half a second more, of each rank again.
``forked_programs`` says how, and does the same with this package alone.
"""

from __future__ import annotations

import ctypes
import socket
import sys
from typing import TYPE_CHECKING, ClassVar

import forked_programs
from forked_programs import PACKAGE, Origin, become, execute, import_package, next_program, wait_for_programs

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

_TORCH = Origin(
    __file__,
    ("PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_", "LD_", "MALLOC_", "KINETO_"),
    left_out=("PYTHONPATH",),
    more=(("OMP_NUM_THREADS", "1"),),
)


def note_variables() -> None:
    """The environment of the processes is as it is when first asked for: before any test has changed it."""
    for origin in (_TORCH, _BOTH):
        forked_programs.variables(origin)


class _Popen(forked_programs.Popen):
    origin: ClassVar[Origin] = _TORCH


_BOTH = Origin(
    __file__,
    _TORCH.read_at_start + PACKAGE.read_at_start,
    left_out=PACKAGE.left_out,
    more=_TORCH.more + PACKAGE.more,
    words=("package",),
    start=_Popen,
)


class _PopenWithPackage(forked_programs.Popen):
    origin: ClassVar[Origin] = _BOTH


def run(
    program: str | Path | tuple[str, ...],
    *arguments: str,
    environment: dict[str, str],
    folder: str | Path | None = None,
    filters: tuple[str, ...] = (),
    timeout: float = 120,
    has_package: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` gives of ``python -c program``, of ``python file`` or of ``python -m module``.

    Args:
        program: a text, a file's path, or ("-m", module).
        arguments: those of the program.
        environment: all of its variables.
        folder: where it runs.
        filters: what ``-W`` would be given.
        timeout: seconds, after which it is killed.
        has_package: this package is imported as well, behind torch.
    """
    form = program if isinstance(program, tuple) else ("-c", program) if isinstance(program, str) else (str(program),)
    options = [word for text in filters for word in ("-W", text)]
    command = [sys.executable, *options, *form, *arguments]
    start = _PopenWithPackage if has_package else _Popen
    return forked_programs.run(command, timeout=timeout, start=start, env=environment, cwd=folder)


# ---- the process that forks ----


def _leave_torch_whole() -> None:
    """At the end of the process C++ objects of libraries that are loaded by now are not destroyed: torch's take 0.15 s.

    The C library calls what was registered last first: destructors of what the program loads, then these two.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit"):
        library.on_exit(library._exit, None)  # is called with the status
        library.__cxa_atexit(library.fflush, None, None)


def _serve() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    import torch._dynamo  # noqa: F401 - so that the programs have both

    if sys.argv[2:]:
        import cffi.cparser  # noqa: F401 - as the library of operators does

        import_package()
    wait_for_programs()
    program = become(next_program(connection))
    _leave_torch_whole()
    execute(*program)


if __name__ == "__main__":
    _serve()
