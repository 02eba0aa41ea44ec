"""The commands that pages show, and the pages themselves, as programs forked from a process that has torch and this package imported.

Importing them takes longer than what most commands do. :func:`commands` makes a folder for the path, in which ``otel-torchprof`` and
``page_blocks`` hand their arguments, environment, folder and streams to that process, and end as the program does that it forks.
Where a variable is given that would have been read at an import, they start an interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from forked_programs import become, execute, take, wait_for_programs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MODULES = {"otel-torchprof": "otel_torchprof", "page_blocks": "page_blocks"}
_READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_", "LD_", "MALLOC_", "KINETO_", "CUDA_"),
    *("PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONOPTIMIZE"),
    *("OTEL_PYTHON_", "OTEL_SDK_", "OTEL_ATTRIBUTE_", "OTEL_SPAN_", "OTEL_PROPAGATORS"),
)
_COMMAND = """\
#!{python} -IS
import json, os, socket, sys
name = os.path.basename(sys.argv[0])
module = {modules}[name]
read = {{key: value for key, value in os.environ.items() if key.startswith({prefixes})}}
if read != {read}:
    os.execv({python!r}, [{python!r}, "-m", module, *sys.argv[1:]])
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({address!r})
request = {{"command": ["-m", module, *sys.argv[1:]], "environment": dict(os.environ), "folder": os.getcwd()}}
socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
sys.exit(int(connection.recv(64)))
"""


@contextlib.contextmanager
def commands(folder: Path, environment: dict[str, str]) -> Iterator[Path]:
    """A folder with the commands; they serve until the block ends."""
    address = str(folder / "socket")
    read = {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)}
    places = {"python": sys.executable, "modules": _MODULES, "prefixes": _READ_AT_IMPORT, "read": read}
    for name in _MODULES:
        command = folder / name
        command.write_text(_COMMAND.format(address=address, **places))
        command.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        words = [sys.executable, __file__, str(listening.fileno())]
        process = subprocess.Popen(words, env=environment, pass_fds=[listening.fileno()])
    try:
        yield folder
    finally:
        process.terminate()
        process.wait()


# ---- the process that forks ----


def _next_program(listening: socket.socket) -> dict[str, Any]:
    """Returns in a child of a child, with its program; the process itself continues with the next command until it is terminated."""
    while True:
        connection = listening.accept()[0]
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            break
        connection.close()
    data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    pid = os.fork()
    if pid == 0:
        connection.close()
        take(streams, [0, 1, 2])
        return {**json.loads(data), "own_session": False}
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(pid, signal.SIGKILL)  # whoever asked for it has given it up
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(str(status if status >= 0 else 128 - status).encode())
    os._exit(0)


def _serve() -> None:
    listening = socket.socket(fileno=int(sys.argv[1]))
    import torch
    import torch._dynamo  # noqa: F401 - as the first step of an optimizer does

    import otel_torchprof
    from otel_torchprof._cli import main

    main._parser()
    for name in otel_torchprof.__all__:
        getattr(otel_torchprof, name)
    wait_for_programs()
    execute(*become(_next_program(listening)))


if __name__ == "__main__":
    _serve()
