"""Programs in processes of their own, forked from one that has this package imported: importing it takes longer than most of them.

:class:`Popen` and :func:`run` are those of ``subprocess`` for ``python -c``, ``python -m`` and ``python file``. The first one starts a
process that imports the package and has one thread, and each forks a child of it, which becomes the program: with its arguments,
environment, folder, streams and descriptors. It ends as an interpreter does. For programs that import the package anyway, and for
which it does not matter before what else: those whose subject is how an interpreter starts, what is imported when, or variables that
are read at an import, need a process that is started for them (``subprocess``). ``preloaded`` is the same with torch imported, and this
package only where a program says so.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[2]
_MOST_BYTES = 1 << 20
_FIRST_FREE = 500
"""Descriptors from here on are none that a program is given."""
_BASE = sys.path[1:]
"""Where the process finds modules besides what a program's own environment names."""


# ---- the test's side ----


@dataclass(frozen=True)
class Origin:
    """A process that forks, and which ends when the connection to it does.

    Args:
        script: what it runs, with the number of its end of the connection.
        read_at_start: what variables begin with that have no effect any more in a program that is forked from it.
        left_out: what variables begin with that it does not get.
        more: variables that it has besides; of these programs may have others.
        words: what the script is given.
        start: how it begins, which may be as a fork of another one.
    """

    script: str
    read_at_start: tuple[str, ...]
    left_out: tuple[str, ...]
    more: tuple[tuple[str, str], ...]
    words: tuple[str, ...] = ()
    start: type[subprocess.Popen[Any]] = subprocess.Popen


@functools.cache
def variables(origin: Origin) -> dict[str, str]:
    """The environment of the process: that of when it is first asked for, before any test has changed it."""
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(origin.left_out) or "BUILD_DIR" in name
    }
    return own | dict(origin.more)


@functools.cache
def connection(origin: Origin) -> socket.socket:
    """To the process, which is started when it is first asked for."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        words = [sys.executable, origin.script, str(theirs.fileno()), *origin.words]
        process = origin.start(
            words,
            env=variables(origin),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _check(origin: Origin, environment: dict[str, str]) -> None:
    """Fails where a program would run under other settings than those it was given."""
    known = variables(origin)
    for name in environment.keys() | known.keys():
        if name.startswith(origin.read_at_start) and name not in {"PYTHONPATH", *dict(origin.more)}:
            same = environment.get(name) == known.get(name)
            assert same, f"{name} counts where an interpreter starts: start one for this program"


PACKAGE = Origin(
    __file__,
    ("PYTHON", "OMP_", "OPENBLAS_", "LD_", "MALLOC_", "OTEL_PYTHON_CONTEXT"),
    left_out=("OTEL_", "PYTHONPATH"),
    more=(("PYTHONPATH", str(ROOT)),),
)


class Popen(subprocess.Popen):  # type: ignore[type-arg]  # of text or of bytes, as its arguments say
    """As that of ``subprocess``; the command is ``[sys.executable, *("-W", filter), "-c" | "-m" | file, ...]``."""

    origin: ClassVar[Origin] = PACKAGE

    def _execute_child(
        self, args: Any, _executable: Any, preexec_fn: Any, _close: Any, pass_fds: Any, *rest: Any
    ) -> None:
        """What ``subprocess`` does by an ``execve``."""
        folder, environment, _, _, shell, *ends = rest[:11]
        streams = [end if end >= 0 else number for number, end in enumerate((ends[0], ends[3], ends[5]))]
        command = [os.fsdecode(word) for word in args]
        assert not shell
        assert preexec_fn is None
        assert command.pop(0) == sys.executable
        environment = dict(os.environ if environment is None else environment)
        _check(self.origin, environment)
        request = {
            "command": command,
            "environment": environment,
            "folder": str(folder or Path.cwd()),
            "descriptors": [0, 1, 2, *pass_fds],
            "own_session": bool(rest[16]),
        }
        link = connection(self.origin)
        socket.send_fds(link, [json.dumps(request).encode()], [*streams, *pass_fds])
        for end in (ends[0], ends[3], ends[5]):
            if end not in {-1, getattr(self, "_devnull", None)}:
                os.close(end)
        if getattr(self, "_devnull", None) is not None:
            os.close(self._devnull)
        self._child_created = True
        self._closed_child_pipe_fds = True
        self.pid = int(link.recv(64))
        self._ended = os.pidfd_open(self.pid)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As ``os.waitpid``, which only its parent may call."""
        if not select.select([self._ended], [], [], 0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        link = connection(self.origin)
        link.send(str(self.pid).encode())
        os.close(self._ended)
        return self.pid, int(link.recv(64))

    def _internal_poll(self, *_functions: Any, **_keywords: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


def run(
    command: Any, *, timeout: float = 60, check: bool = False, start: type[Popen] = Popen, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with its output captured as text."""
    with start(
        command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


# ---- the other side ----


def next_program(connection: socket.socket) -> dict[str, Any]:
    """Returns in a child, with its program; the process itself says how children ended when asked, and ends here."""
    while True:
        data, ends, _, _ = socket.recv_fds(connection, _MOST_BYTES, 16)
        if not data:
            os._exit(0)
        request: Any = json.loads(data)
        if isinstance(request, int):
            connection.send(str(os.waitpid(request, 0)[1]).encode())
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            take(ends, request["descriptors"])
            return dict(request)
        for end in ends:
            os.close(end)
        connection.send(str(pid).encode())


def take(ends: list[int], numbers: list[int]) -> None:
    """Moves descriptors to where the program is to have them, and closes all others."""
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD, _FIRST_FREE) for end in ends]
    os.closerange(0, _FIRST_FREE)
    for end, number in zip(moved, numbers, strict=True):
        os.dup2(end, number)
    os.closerange(_FIRST_FREE, moved[-1] + 1)


def become(request: dict[str, Any]) -> tuple[str, str]:
    """Makes of this process what it would be, had it been started for the program, without a ``__main__``: its kind and text or name."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["own_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    command = request["command"]
    while command[0] == "-W":
        sys.warnoptions.append(command[1])
        warnings._processoptions([command[1]])  # type: ignore[attr-defined]  # as for -W; there is no other way
        del command[:2]
    kind = command.pop(0) if command[0] in {"-c", "-m"} else "file"
    program = command.pop(0)
    first = {"file": str(Path(program).resolve().parent), "-c": "", "-m": request["folder"]}[kind]
    found = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [first, *(found.split(os.pathsep) if found else ()), *_BASE]
    sys.argv[:] = [program if kind == "file" else kind, *command]
    return kind, program


def execute(kind: str, program: str) -> None:
    """Runs the program; what it raises propagates from here to the interpreter's end."""
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "file":
        main.__file__ = program
    text = Path(program).read_text() if kind == "file" else program
    exec(compile(text, program if kind == "file" else "<string>", "exec"), main.__dict__)  # noqa: S102 - a test's program


def wait_for_programs() -> None:
    """Before the first one: from here on there is one thread, and what there is is not looked at by collections of a child."""
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{threads}: a fork has only one of them"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who interrupts the tests ends this process, too, by ending them
    gc.collect()
    gc.freeze()


def import_package() -> None:
    """All of it that programs usually come to."""
    import otel_torchprof
    from otel_torchprof._cli import main

    for name in otel_torchprof.__all__:
        with contextlib.suppress(ImportError):
            getattr(otel_torchprof, name)
    main._parser()
    import numpy.ma  # noqa: F401 - as a recording that ends does


def _serve() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    import_package()
    wait_for_programs()
    execute(*become(next_program(connection)))


if __name__ == "__main__":
    _serve()
