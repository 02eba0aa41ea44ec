"""Programs in processes of their own, forked from one that has torch imported: importing it takes longer than most of them.

So does importing what the first optimizer of a program imports, torch's compiler: that is there, too.

``run`` starts that process when it is first called and hands it what to run; it forks a child for each program, in which that is
``__main__``, with an environment, arguments and streams of its own, and which ends as an interpreter does. It has one thread and
nothing of this package. For programs that import torch anyway, and for which it does not matter before what else: those whose
subject is how an interpreter starts or ends, with all destructors, or what is imported first, need one that is started for them
(``subprocess.run``).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

_READ_AT_START = ("PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_", "LD_", "MALLOC_", "KINETO_")
"""What variables begin with that have no effect any more in a process that has torch."""
_MOST_BYTES = 1 << 20
_BASE = sys.path[1:]
"""Where the process finds modules besides what a program's own environment names."""


# ---- the test's side ----


@functools.cache
def variables() -> dict[str, str]:
    """The environment of the process that imports torch: as it is when first asked for, before any test has changed it."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@functools.cache
def _server() -> socket.socket:
    """The connection to the process that forks. It ends when the connection does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environment = {name: value for name, value in variables().items() if name != "PYTHONPATH"}
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _check(environment: dict[str, str]) -> None:
    """Fails where a program would run under other settings than those it was given."""
    for name in environment.keys() | variables().keys():
        if name.startswith(_READ_AT_START) and name not in {"PYTHONPATH", "OMP_NUM_THREADS"}:
            same = environment.get(name) == variables().get(name)
            assert same, f"{name} counts where an interpreter starts: start one for this program"


def _read(pipes: tuple[int, ...], connection: socket.socket, deadline: float) -> tuple[list[str], int | None, bool]:
    """What came from the pipes, the program's status, and whether it has ended and nobody has its streams any more."""
    said: dict[int, bytes] = dict.fromkeys(pipes, b"")
    status: int | None = None
    with selectors.DefaultSelector() as waiting:
        for source in (*pipes, connection):
            waiting.register(source, selectors.EVENT_READ)
        while waiting.get_map():
            ready = waiting.select(max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for key, _ in ready:
                if key.fileobj is connection:
                    status = int(connection.recv(64))  # nothing: the process that forks has died, and fails the test
                    waiting.unregister(connection)
                elif came := os.read(key.fd, 1 << 16):
                    said[key.fd] += came
                else:
                    waiting.unregister(key.fd)
        is_all = not waiting.get_map()
    return [said[pipe].decode() for pipe in pipes], status, is_all


def run(
    program: str | Path | tuple[str, ...],
    *arguments: str,
    environment: dict[str, str],
    folder: str | Path | None = None,
    filters: tuple[str, ...] = (),
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` gives of ``python -c program``, of ``python file`` or of ``python -m module``.

    Args:
        program: a text, a file's path, or ("-m", module).
        arguments: those of the program.
        environment: all of its variables.
        folder: where it runs.
        filters: what ``-W`` would be given.
        timeout: seconds, after which it is killed.
    """
    _check(environment)
    connection = _server()
    kind, what = program if isinstance(program, tuple) else ("-c" if isinstance(program, str) else "file", str(program))
    request = {
        "kind": kind,
        "program": what,
        "arguments": arguments,
        "environment": environment,
        "folder": str(folder or Path.cwd()),
        "filters": filters,
    }
    pipes, ends = zip(os.pipe(), os.pipe(), strict=True)
    try:
        try:
            socket.send_fds(connection, [json.dumps(request).encode()], ends)
        finally:
            for end in ends:
                os.close(end)
        pid = int(connection.recv(64))
        (output, errors), status, is_all = _read(pipes, connection, time.monotonic() + timeout)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            connection.recv(64)  # the status, or it would be taken for that of the next program
        if status is None or not is_all:
            raise subprocess.TimeoutExpired(what, timeout, output, errors)
    finally:
        for pipe in pipes:
            os.close(pipe)
    return subprocess.CompletedProcess(what, status, output, errors)


# ---- the other side ----


def _next_program(connection: socket.socket) -> dict[str, Any]:
    """Returns in a child, with its program; the process itself waits for each of its children and ends here."""
    while True:
        data, ends, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
        if not data:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            connection.close()
            for end, stream in zip(ends, (1, 2), strict=True):
                os.dup2(end, stream)
                os.close(end)
            request: dict[str, Any] = json.loads(data)
            return request
        for end in ends:
            os.close(end)
        connection.send(str(pid).encode())
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(request: dict[str, Any]) -> None:
    """Makes of this process what it would be, had it been started for the program; without a ``__main__``."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    kind, program = request["kind"], request["program"]
    first = str(Path(program).parent) if kind == "file" else "" if kind == "-c" else request["folder"]
    found = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [first, *(found.split(os.pathsep) if found else ()), *_BASE]
    sys.argv[:] = [program if kind == "file" else kind, *request["arguments"]]
    for text in request["filters"]:
        sys.warnoptions.append(text)
        warnings._processoptions([text])  # type: ignore[attr-defined]  # as for -W; there is no other way


def _leave_torch_whole() -> None:
    """At the end of the process C++ objects of libraries that are loaded by now are not destroyed: torch's take 0.15 s.

    The C library calls what was registered last first: destructors of what the program loads, then these two.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit"):
        library.on_exit(library._exit, None)  # is called with the status
        library.__cxa_atexit(library.fflush, None, None)


def _execute(request: dict[str, Any]) -> None:
    """Runs the program; what it raises propagates from here to the interpreter's end."""
    kind, program = request["kind"], request["program"]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "file":
        main.__file__ = program
    text = Path(program).read_text() if kind == "file" else program
    exec(compile(text, program if kind == "file" else "<string>", "exec"), main.__dict__)  # noqa: S102 - a test's program


def _serve() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    import torch._dynamo  # noqa: F401 - so that the programs have both

    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{threads}: a fork has only one of them"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who interrupts the tests ends this process, too, by ending them
    gc.collect()
    gc.freeze()  # a collection in a child, and that at its end, is of what the child makes
    request = _next_program(connection)
    _become(request)
    _leave_torch_whole()
    _execute(request)


if __name__ == "__main__":
    _serve()
