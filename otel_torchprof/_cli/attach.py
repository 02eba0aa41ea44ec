"""Reaches a process by its id: over its control socket, or, from Python 3.14 on, one that does not use this package by instrumenting it."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof._process import threads
from otel_torchprof._process.control_wire import ControlError

from .control_client import SECONDS, Process, process_at, process_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LOOK_SECONDS = 0.02
_MOST_BYTES = 1 << 16
"""What is read of the lines of the script."""


@contextmanager
def reached(pid: int, *, builds: bool = False) -> Iterator[Process]:
    """Yields the process with an id; one without a socket is instrumented until the block ends, if both run Python 3.14 or later.

    Its main thread starts a thread that imports this package, and opens a stream without exporters as long as the client lives: it waits
    for the lock of the script's file. Each client has its own stream. SIGTERM ends the block as an exception does.

    Args:
        pid: process id.
        builds: whether to build what records the operators of its torch before.

    Raises:
        ControlError: it cannot be reached; the message says why, and what to do.
        FolderError: the folder of the sockets is not private.
    """
    is_entered = _remote_exec is not None and _is_entered(pid)  # first: a client that leaves takes the socket along
    if not is_entered and (process := process_of(pid)) is not None:
        yield process
        return
    check_exists(pid)
    if _remote_exec is None:
        raise ControlError(f"process {pid} {NO_SOCKET}, or run it and this command under Python 3.14")
    descriptor, path = tempfile.mkstemp(prefix=_SCRIPT_PREFIX, suffix=_SCRIPT_SUFFIX)
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        stack.callback(Path(path).unlink, missing_ok=True)  # the script does so too
        stack.enter_context(ended_by_sigterm())
        try:
            if builds:
                _build_for(pid)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            text = _SCRIPT.format(path=path, folders=_folders()).encode()
            os.write(descriptor, text)
            if os.geteuid() == 0:
                os.fchown(descriptor, *_owner_of(pid))
            script = _Script(pid, descriptor, len(text), _remote_exec)
            process = _process_at(pid, script.run(path))
        except ControlError:
            if _has_ended(pid):
                raise ControlError(f"process {pid} has ended") from None
            raise
        stack.callback(script.wait, 3, SECONDS)
        stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        yield process


def check_exists(pid: int) -> None:
    """Checks that there is a process that this user may ask.

    Raises:
        ControlError: there is none, or it belongs to another user.
    """
    try:
        owner = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116 - of the process
    except OSError:
        raise ControlError(f"there is no process {pid}: otel-torchprof top lists those that are instrumented") from None
    if owner != os.geteuid() and os.geteuid():
        raise ControlError(f"process {pid} belongs to another user: only that user and root may ask it")


def _is_entered(pid: int) -> bool:
    """Whether a process is instrumented for another client: it holds the file of that client's script open."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                name = descriptor.readlink().name.removesuffix(" (deleted)")
                if name.startswith(_SCRIPT_PREFIX) and name.endswith(_SCRIPT_SUFFIX):
                    return True
    return False


def _has_ended(pid: int) -> bool:
    """Whether a process has ended, though its parent may not have waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"ZX"
    except OSError:
        return True


def _process_at(pid: int, path: str) -> Process:
    """The process with the path of its socket, as the process sees it: it may have another folder of sockets, and other mounts."""
    whole = Path(f"/proc/{pid}/root{path}")
    try:
        found = process_at(whole.parent, whole.name)
    except OSError as error:
        raise ControlError(f"process {pid}: its control socket {path} cannot be used: {error.strerror}") from error
    if found.pid != pid:
        raise ControlError(f"process {pid}: its control socket {path} is that of process {found.pid}")
    return found


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM, where it would end the process at once, ends the block by SystemExit."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if is_ours:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_remote_exec: Callable[[int, str], None] | None = vars(sys).get("remote_exec")
NO_SOCKET = (
    "is not instrumented, or has no control socket: start it with otel-torchprof run, opentelemetry-instrument or "
    "TorchInstrumentor().instrument(), without OTEL_TORCHPROF_CONTROL=off"
)
_SCRIPT_SECONDS, _IMPORT_SECONDS = 10.0, 60.0
"""Time for the main thread of a program to run Python, and for the imports on a busy machine."""
_SCRIPT_PREFIX, _SCRIPT_SUFFIX = "otel-torchprof-", ".py"
_SCRIPT = """\
import importlib.machinery, importlib.util

def enter(path={path!r}, folders={folders!r}):
    import fcntl, os, sys
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # the client has left
        return
    added = [folder for folder in folders if folder not in sys.path]

    def remove():  # what is imported later is found without them
        for place in [place for place, each in enumerate(sys.path) if any(each is folder for folder in added)][::-1]:
            del sys.path[place]

    def fail(error):
        os.write(file, " ".join((type(error).__name__ + ": " + str(error)).split()).encode(errors="replace") + b"\\n")

    def end():
        remove()
        os.write(file, b"\\n")
        os.close(file)

    def record():
        try:
            from otel_torchprof._instrument.control_verbs import socket
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return  # the client has left
            except BlockingIOError:
                pass
            with otel_torchprof.stream(detail="steps") as stream:
                remove()
                if socket.path is None:
                    raise RuntimeError("recording " + stream.health.sources["recording"] + ", control socket " + socket.state)
                os.write(file, os.fsencode(socket.path) + b"\\n")
                fcntl.flock(file, fcntl.LOCK_SH)
        except BaseException as error:
            fail(error)
        finally:
            end()

    try:
        os.write(file, b"\\n")
        try:
            os.unlink(path)
        except OSError:  # not its folder: the client does so
            pass
        sys.path.extend(added)
        import otel_torchprof
        from otel_torchprof._process.threads import Thread
        Thread(target=record, name="otel-torchprof-client", daemon=True).start()
    except BaseException as error:
        fail(error)
        end()

# No greenlet, where threads are greenlets; and threading does not list it, since a program could not join it. The imports that ask
# threading for their thread are those of the other thread, a daemon as all of this package.
threads = importlib.util.module_from_spec(importlib.machinery.BuiltinImporter.find_spec("_thread"))
importlib.machinery.BuiltinImporter.exec_module(threads)
threads.start_new_thread(enter, ())
"""
"""Run by the main thread between two instructions. What it writes behind itself: a line as it begins, one with the path of the socket once
the process is instrumented or with the error, and one at its end."""
_CACHE_VARIABLES = ("HOME", "XDG_CACHE_HOME", config.BUILD_DIR.variable)


def _folders() -> list[str]:
    """Folders that this package and what it imports are in."""
    sites = [folder for folder in sys.path if Path(folder).name in {"site-packages", "dist-packages"}]
    return list(dict.fromkeys([str(Path(__file__).parents[2]), *sites]))


def _owner_of(pid: int) -> tuple[int, int]:
    try:
        info = os.stat(f"/proc/{pid}")  # noqa: PTH116 - of the process
    except OSError:
        raise ControlError(f"process {pid} has ended") from None
    return info.st_uid, info.st_gid


def _build_for(pid: int) -> None:
    """Builds the library for the torch of a process, where and as whom the process will look for it.

    Raises:
        ControlError: it cannot be built, or the process has not imported torch.
    """
    try:
        maps, environment = (os.fsdecode(Path(f"/proc/{pid}/{name}").read_bytes()) for name in ("maps", "environ"))
    except OSError as error:
        raise _not_permitted(pid, error) from error
    given = dict(entry.partition("=")[::2] for entry in environment.split("\0"))
    if (torch := re.search(r"/\S.*(?=/torch/lib/libtorch_cpu\.so)", maps)) is None:
        raise ControlError(f"process {pid} has not imported torch: there is nothing to record")
    own = {name: value for name, value in os.environ.items() if name not in _CACHE_VARIABLES}
    same = {name: given[name] for name in _CACHE_VARIABLES if name in given}
    user, group = _owner_of(pid)
    who: dict[str, Any] = {} if user == os.geteuid() else {"user": user, "group": group, "extra_groups": []}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "otel_torchprof", "build"],
        env={**own, **same, "PYTHONPATH": os.pathsep.join([torch[0], *_folders()])},
        capture_output=True,
        text=True,
        check=False,
        **who,
    )
    if done.returncode:
        raise ControlError(f"process {pid} cannot be recorded: {(done.stderr.strip() or 'no reason').splitlines()[-1]}")


class _Script:
    """The script in a process.

    Args:
        pid: process id.
        file: descriptor of the script's file, which the script writes to.
        size: bytes of the script.
        execute: has a process run the script with a path.
    """

    def __init__(self, pid: int, file: int, size: int, execute: Callable[[int, str], None]) -> None:
        self._pid, self._file, self._size, self._execute = pid, file, size, execute

    def run(self, path: str) -> str:
        """Waits until the process is instrumented; returns the path of its socket.

        Raises:
            ControlError: it is not; the message says why, and what to do.
        """
        try:
            self._execute(self._pid, path)
        except OSError as error:
            raise _not_permitted(self._pid, error) from error
        except RuntimeError as error:
            raise ControlError(
                f"process {self._pid} {NO_SOCKET}; this Python cannot enter it ({error}): that needs a process of Python "
                f"{sys.version_info.major}.{sys.version_info.minor} without PYTHON_DISABLE_REMOTE_DEBUG and -X disable-remote-debug"
            ) from error
        try:
            lines = self.wait(1, _SCRIPT_SECONDS)
        except BaseException:
            self._withdraw()
            raise
        if not lines:
            self._withdraw()
            raise ControlError(
                f"the main thread of process {self._pid} has run no Python for {_SCRIPT_SECONDS:.0f} seconds, or cannot read {path}: it "
                "waits in C, for a lock, a child or the network, or an audit hook refuses; try again when it runs, or set TMPDIR to a folder "
                "that the process sees"
            )
        lines = self.wait(2, _IMPORT_SECONDS)
        if not lines[1:] or not lines[1].startswith("/"):
            why = lines[1] if lines[1:] else f"imports have taken {_IMPORT_SECONDS:.0f} seconds"
            raise ControlError(f"process {self._pid} cannot be instrumented: {why}")
        return lines[1]

    def wait(self, count: int, seconds: float) -> list[str]:
        """Waits for lines of the script, for so many seconds, and while the process lives; returns those that there are."""
        deadline, lines = time.monotonic() + seconds, list[str]()
        while len(lines) < count and time.monotonic() < deadline and not _has_ended(self._pid):
            threads.sleep(_LOOK_SECONDS)
            lines = os.fsdecode(os.pread(self._file, _MOST_BYTES, self._size)).split("\n")[:-1]
        return lines

    def _withdraw(self) -> None:
        """Has the process run an empty script instead: another user may give a file the name of the one that is removed."""
        with suppress(OSError, RuntimeError):
            self._execute(self._pid, os.devnull)


def _not_permitted(pid: int, error: OSError) -> ControlError:
    return ControlError(
        f"process {pid} {NO_SOCKET}; this Python may not enter it ({error.strerror}): that needs the right to trace it, as root, with "
        "kernel.yama.ptrace_scope=0, or in a container with the capability SYS_PTRACE"
    )
