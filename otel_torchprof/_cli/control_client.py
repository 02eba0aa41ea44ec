"""Asks running processes over their control sockets."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._process import threads
from otel_torchprof._process.control_wire import (
    ERROR,
    PROGRESS,
    RESULT,
    SUFFIX,
    ControlError,
    address,
    client_folders,
    opened_folder,
    peer,
    request_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

SECONDS = 5.0
"""Time for a process to answer: it looks four times a second."""
_PIECE = 1 << 16
_MAX_LINE = 64 << 20
_RETRY_SECONDS = 0.02


class Process(NamedTuple):
    """A running process with a control socket."""

    pid: int
    """As this process sees it."""
    folder: Path
    name: str
    """Name of the socket in the folder."""


def processes() -> list[Process]:
    """The instrumented processes that this user may ask, by pid. Removes sockets of dead processes.

    Raises:
        FolderError: the folder of the sockets is not private.
    """
    found = []
    for folder in client_folders():
        with suppress(FileNotFoundError):
            names = [name for name in os.listdir(folder) if name.endswith(SUFFIX) and not name.startswith(".")]  # noqa: PTH208
            for name in names:
                with suppress(OSError):
                    found.append(process_at(folder, name))
    return sorted(found)


def process_of(pid: int) -> Process | None:
    """The instrumented process with an id; None if there is none. Raises as :func:`processes`."""
    return next((process for process in processes() if process.pid == pid), None)


class ControlCall(NamedTuple):
    """A request to a process."""

    process: Process
    verb: str
    arguments: Mapping[str, Any]
    files: Sequence[int] = ()
    """Descriptors for the process; the caller closes its own."""


def ask_each(
    calls: Sequence[ControlCall],
    *,
    seconds: float = SECONDS,
    on_progress: Callable[[ControlCall, Mapping[str, Any]], None] | None = None,
    on_answer: Callable[[ControlCall, Mapping[str, Any] | ControlError], None] | None = None,
) -> list[Mapping[str, Any] | ControlError]:
    """Asks several processes at once; returns the results, or errors, in the order of the calls.

    Args:
        calls: the requests.
        seconds: time limit between two lines of a process.
        on_progress: called with each line of progress.
        on_answer: called with each result or error, while others are waited for.
    """
    conversations = [_Conversation(call, seconds) for call in calls]
    try:
        waiting = conversations
        while waiting:
            for each in waiting:
                if each.answer is not None and on_answer is not None:
                    on_answer(each.call, each.answer)
            waiting = [each for each in waiting if each.answer is None]
            if waiting:
                _wait(waiting)
            for each in waiting:
                for progress in each.read():
                    if on_progress is not None:
                        on_progress(each.call, progress)
    finally:
        for each in conversations:
            each.close()
    return [each.answer for each in conversations if each.answer is not None]


class _Conversation:
    """A call in progress. :attr:`answer` is the result or the error, once it is known."""

    def __init__(self, call: ControlCall, seconds: float) -> None:
        self.call = call
        self.answer: Mapping[str, Any] | ControlError | None = None
        self._seconds = seconds
        self._received = bytearray()
        self._socket: socket.socket | None = None
        self.deadline = time.monotonic() + seconds
        try:
            self._socket = _connected(call.process, self.deadline)
            self._socket.settimeout(seconds)
            line = request_line(call.verb, call.arguments)
            with suppress(BrokenPipeError):  # it has answered already: with an error, without reading all of this
                sent = socket.send_fds(self._socket, [line], list(call.files)) if call.files else 0
                self._socket.sendall(line[sent:])
            self._socket.setblocking(False)
        except OSError as error:
            self._fail(f"cannot be asked: {error.strerror or error}")

    def fileno(self) -> int:
        """Its descriptor."""
        return -1 if self._socket is None else self._socket.fileno()

    def read(self) -> Iterable[Mapping[str, Any]]:
        """Reads what is there; returns the lines of progress."""
        lines: list[Mapping[str, Any]] = []
        try:
            while self._socket is not None and (data := self._socket.recv(_PIECE)):
                self._received += data
                self.deadline = time.monotonic() + self._seconds
                if len(self._received) > _MAX_LINE:
                    self._fail("answers without an end")
                    return lines
        except BlockingIOError:
            if time.monotonic() > self.deadline:
                self._fail(f"has not answered for {self._seconds:.0f} seconds: it hangs, or its threads do not run")
            is_over = False
        except OSError as error:
            self._fail(f"cannot be asked: {error.strerror}")
            is_over = True
        else:
            is_over = True
        *whole, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        for line in whole:
            self._take(bytes(line), lines)
        if is_over and self.answer is None:
            self._fail("ended before it had answered")
        return lines

    def _take(self, line: bytes, lines: list[Mapping[str, Any]]) -> None:
        try:
            value = json.loads(line)
            if PROGRESS in value:
                lines.append(value[PROGRESS])
            elif RESULT in value and isinstance(value[RESULT], dict):
                self.answer = value[RESULT]
            else:
                self._fail(str(value[ERROR]))
        except (ValueError, TypeError, KeyError, RecursionError):
            self._fail("answers with something that is no line of JSON")

    def _fail(self, why: str) -> None:
        self.answer = ControlError(f"process {self.call.process.pid}: {why}")

    def close(self) -> None:
        """Closes the connection."""
        if self._socket is not None:
            self._socket.close()


def _wait(waiting: Sequence[_Conversation]) -> None:
    poll = select.poll()
    for each in waiting:
        poll.register(each.fileno(), select.POLLIN)
    remaining = min(each.deadline for each in waiting) - time.monotonic()
    poll.poll(max(remaining, 0) * 1000 + 1)


def _connected(process: Process, deadline: float) -> socket.socket:
    """Returns a connection that does not block, and waits while the process has too many clients.

    Raises:
        OSError: nobody listens, or the deadline is over.
    """
    connection, error = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), errno.EAGAIN
    connection.setblocking(False)
    try:
        with opened_folder(process.folder) as folder:
            while error == errno.EAGAIN:
                error = connection.connect_ex(address(folder, process.name))
                if time.monotonic() >= deadline:
                    break
                if error == errno.EAGAIN:
                    threads.sleep(_RETRY_SECONDS)
    finally:
        if error:
            connection.close()
    if error:
        raise OSError(error, os.strerror(error))
    return connection


def process_at(folder: Path, name: str) -> Process:
    """The process behind a socket; removes a socket that nobody listens on.

    Raises:
        OSError: there is none.
    """
    path = folder / name
    info = path.lstat()
    if not stat.S_ISSOCK(info.st_mode):
        raise OSError(errno.ENOTSOCK, "no socket")
    stated = int(name.partition(".")[0]) if name.partition(".")[0].isdecimal() else 0
    try:
        with _connected(Process(stated, folder, name), time.monotonic()) as connection:
            pid, user = peer(connection)
    except BlockingIOError:  # its queue of clients is full, so it lives
        return Process(stated, folder, name)
    except ConnectionRefusedError:
        path.unlink()
        raise
    if user not in {folder.stat().st_uid, 0}:
        raise OSError(errno.EPERM, "another user listens")
    return Process(pid or stated, folder, name)
