"""The control socket: answers ``otel-torchprof top``, ``record`` and ``dump`` while the process records.

It has no thread: the thread that drains the recorder looks at it four times a second, and nothing of it ever waits. What takes longer
takes its connection along to a thread of its own (:meth:`Request.take`).
"""

from __future__ import annotations

import _socket
import os
import struct
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from otel_torchprof import config
from otel_torchprof._process import threads
from otel_torchprof._process.control_wire import (
    ERROR,
    MAX_FILES,
    MAX_REQUEST,
    PROGRESS,
    RESULT,
    SUFFIX,
    ControlError,
    address,
    is_supported,
    line_of,
    opened_folder,
    parsed_request,
    peer,
    server_folder,
)
from otel_torchprof._process.descriptors import OwnDescriptor
from otel_torchprof._process.quiet import LimitedLog
from otel_torchprof.errors import TorchProfError
from otel_torchprof.health import ON

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Verb = Callable[["Request"], Mapping[str, Any] | None]

MOST_CONNECTIONS = 8
"""Connections whose requests are waited for or whose replies are not read yet; others are told that there are too many."""
_ACCEPTED_AT_ONCE = 64
_BACKLOG = 64
_SECONDS = 5.0
"""Time for a client to send its request, and to read the reply."""
_CMSG_SPACE = _socket.CMSG_SPACE(4 * MAX_FILES)
_PIECE = 1 << 16

_OFF = "off: nothing is recorded"

_log = LimitedLog()


class Controlled(Protocol):
    """An instrumentation whose process can be asked."""

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""


class Request:
    """A request with everything that its verb needs."""

    def __init__(self, arguments: Mapping[str, Any], running: Any, connection: Connection) -> None:
        self.arguments = arguments
        """From the client, not checked."""
        self.running = running
        """The instrumentation that was started first of those that run: an ``Instrumentation`` or ``MetricsInstrumentation``."""
        self._connection = connection

    @property
    def files(self) -> list[OwnDescriptor]:
        """The client's files, which are closed with the connection."""
        return self._connection.files

    def take(self) -> Connection:
        """Takes the connection, for a thread of the verb's that replies later. The verb then returns None."""
        self._connection.is_taken = True
        return self._connection


class _OwnSocket:
    """A socket that is used and closed only while it is this package's own: its number may be that of the program's own file later.

    Args:
        descriptor: is moved up.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = OwnDescriptor(descriptor)
        self.socket = _socket.socket(fileno=self._descriptor.number)
        self.socket.setblocking(False)

    @property
    def is_own(self) -> bool:
        """Whether nobody else has closed it."""
        return self._descriptor.is_own

    def close(self) -> None:
        """Closes it, if it is open and its own."""
        self.socket.detach()
        self._descriptor.close()


class Connection:
    """A connection to a client. Nothing waits, except after :meth:`Request.take`."""

    def __init__(self, descriptor: int, deadline: float) -> None:
        self._own = _OwnSocket(descriptor)
        self._socket = self._own.socket
        self.deadline = deadline
        self.files: list[OwnDescriptor] = []
        self.is_taken = False
        self._received = bytearray()
        self._unsent = bytearray()
        self._has_replied = False

    @property
    def user(self) -> int:
        """The client's user."""
        return peer(self._socket)[1]

    def request(self) -> bytes | None:
        """Returns the request once it has come; None before.

        Raises:
            ControlError: the client has left, or the request is too long.
        """
        while not self._has_replied:
            try:
                data, control, _, _ = self._socket.recvmsg(_PIECE, _CMSG_SPACE, _socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return None
            self._keep_files(control)
            if not data:
                raise ControlError("the client has left")
            self._received += data
            if len(self._received) > MAX_REQUEST:
                raise ControlError(f"the request is longer than {MAX_REQUEST} bytes")
            line, feed, _ = self._received.partition(b"\n")
            if feed:
                return bytes(line)
        return None

    def _keep_files(self, control: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in control:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                count = len(data) // 4
                self.files += map(OwnDescriptor, struct.unpack(f"{count}i", data[: 4 * count]))
        for descriptor in self.files[MAX_FILES:]:
            descriptor.close()
        del self.files[MAX_FILES:]

    def reply(self, value: Mapping[str, Any], now: float) -> None:
        """Sends the last line, now and with each further :meth:`flush`."""
        self._has_replied = True
        self._unsent += line_of(value)
        self.deadline = now + _SECONDS

    def flush(self) -> bool:
        """Sends what the client takes now; returns whether all of the reply is sent."""
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent[:_PIECE], _socket.MSG_NOSIGNAL)]
        return self._has_replied and not self._unsent

    def has_left(self) -> bool:
        """Whether the client has closed its end."""
        if not self._own.is_own:
            return True
        try:
            self._socket.setblocking(False)
            return not self._socket.recv(1, _socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, value: Mapping[str, Any]) -> bool:
        """Sends a line from a thread that has taken the connection, within five seconds; returns False if the client is not there any more."""
        if not self._own.is_own:
            return False
        try:
            self._socket.settimeout(_SECONDS)
            self._socket.sendall(line_of(value), _socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def progress(self, value: Mapping[str, Any]) -> bool:
        """Sends a line of progress; as :meth:`send`."""
        return self.send({PROGRESS: value})

    def end(self, result: Mapping[str, Any] | None, error: str = "") -> None:
        """Sends the last line, and closes the connection."""
        self.send({RESULT: result} if result is not None else {ERROR: error})
        self.close()

    def close(self) -> None:
        """Closes it and its files."""
        self._own.close()
        for descriptor in self.files:
            descriptor.close()
        self.files = []


class ControlSocket:
    """The socket of this process: it exists while a live recording runs, unless ``OTEL_TORCHPROF_CONTROL`` is ``off``. Thread-safe.

    Args:
        verbs: by name: functions that return the result, or None if they have taken the connection. They run on the drain thread, so for
            some milliseconds at most. Their exceptions become the error that the client is told.
        clock: seconds, for deadlines.
    """

    def __init__(self, verbs: Mapping[str, Verb], clock: Callable[[], float] = time.monotonic) -> None:
        self._verbs = verbs
        self._clock = clock
        self.state = _OFF
        """``on``, or ``off: `` and the reason."""
        self._listener: _OwnSocket | None = None
        self._closing: list[_OwnSocket] = []
        self._taken: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._path: Path | None = None
        self._connections: list[Connection] = []
        self._reset()

    def _reset(self) -> None:
        self._changing, self._looking = threads.RLock(), threads.Lock()
        self._running: list[Controlled] = []

    @property
    def path(self) -> Path | None:
        """Path of the socket; None without one."""
        return self._path

    @property
    def running(self) -> list[Any]:
        """The instrumentations that run, ``Instrumentation`` or ``MetricsInstrumentation``, in the order of their starts."""
        return [each for each in tuple(self._running) if each.is_running]

    def enter(self, running: Controlled) -> None:
        """Adds an instrumentation that has started; the first opens the socket. Nothing that fails here raises."""
        with self._changing:
            if running in self._running:
                return
            self._running.append(running)
            if self._listener is None:
                self._open()

    def leave(self, running: Controlled) -> None:
        """Removes an instrumentation that stops; the last removes the socket. May be called repeatedly."""
        with self._changing:
            if running in self._running:
                self._running.remove(running)
            if not self._running:
                self._close()

    def look(self) -> None:
        """Accepts, reads and answers what is there. Costs 2 us if nothing is."""
        listener = self._listener
        if listener is None or not self._looking.acquire(blocking=False):
            return
        try:
            if not listener.is_own:
                self._lose()
                return
            self._accept(listener.socket)
            for connection in self._connections.copy():
                self._serve(connection)
        except Exception as error:  # noqa: BLE001 - the drain thread continues
            _log.warning("the control socket failed: %s: %s", type(error).__name__, error)
        finally:
            self._looking.release()
            if self._closing:
                self._sweep()

    # ---- within ----

    def _open(self) -> None:
        if not is_supported() or config.CONTROL.read() is None:
            self.state = f"off: {config.CONTROL} is off" if is_supported() else "off: this system has no SO_PEERCRED"
            return
        listener = _OwnSocket(_socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC).detach())
        try:
            folder = server_folder().absolute()
            name = f"{os.getpid()}.{os.urandom(4).hex()}{SUFFIX}"
            with opened_folder(folder) as descriptor:
                # Under another name until it listens: a client removes a socket that refuses connections.
                listener.socket.bind(address(descriptor, f".{name}"))
                listener.socket.listen(_BACKLOG)
                os.rename(f".{name}", name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        except (OSError, TorchProfError) as error:
            listener.close()
            self.state = f"off: {error}"
            _log.warning("this process has no control socket: %s; OTEL_TORCHPROF_CONTROL names another folder", error)
            return
        self._listener, self._path, self.state = listener, folder / name, ON

    def _close(self) -> None:
        path, listener = self._path, self._listener
        if path is not None:
            with suppress(OSError):
                path.unlink()
            self._path = None
        if listener is not None:
            self.state = _OFF
            self._closing.append(listener)  # before it is forgotten: an interrupt may come anywhere
            self._listener = None
        self._sweep()

    def _lose(self) -> None:
        """Other code has closed the listener, and all connections with it."""
        with self._changing:
            while self._connections:
                self._connections[-1].close()
                self._connections.pop()
            self._close()
            self.state = "off: other code closed its descriptor"

    def _sweep(self) -> None:
        """Closes what is to be closed, or leaves that to the look in progress: a finalizer that ends a recording may run in its middle."""
        if self._looking.acquire(blocking=False):
            try:
                while self._closing:
                    self._closing[-1].close()
                    self._closing.pop()
                while self._connections:
                    self._connections[-1].close()
                    self._connections.pop()
            finally:
                self._looking.release()

    def _accept(self, listener: _socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                descriptor, _address = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001 - all that the class has
            except OSError:  # nobody is there, or no descriptor is left
                return
            connection = Connection(descriptor, self._clock() + _SECONDS)
            if connection.user not in {os.geteuid(), 0}:
                connection.close()
                continue
            self._connections.append(connection)
            if len(self._connections) > MOST_CONNECTIONS:
                connection.reply({ERROR: "too many clients are connected: try again"}, self._clock())
                self._drop(connection, flush=True)

    def _serve(self, connection: Connection) -> None:
        try:
            line = connection.request()
            if line is not None:
                self._answer(connection, line)
            if connection.is_taken:
                self._taken.add(connection)
                self._connections.remove(connection)
            elif connection.flush() or self._clock() > connection.deadline:
                self._drop(connection)
        except ControlError as error:
            connection.reply({ERROR: str(error)}, self._clock())
            self._drop(connection, flush=True)
        except OSError:
            self._drop(connection)

    def _drop(self, connection: Connection, *, flush: bool = False) -> None:
        if flush:
            with suppress(OSError):
                connection.flush()
        connection.close()
        with suppress(ValueError):  # a finalizer has closed the socket meanwhile
            self._connections.remove(connection)

    def _answer(self, connection: Connection, line: bytes) -> None:
        verb, arguments = parsed_request(line)
        running = next(iter(self.running), None)
        if running is None:
            raise ControlError("the process is not instrumented any more")
        try:
            result = self._verbs[verb](Request(arguments, running, connection))
        except TorchProfError as error:
            raise ControlError(str(error)) from error
        except Exception as error:
            raise ControlError(f"{verb} failed: {type(error).__name__}: {error}") from error
        if not connection.is_taken:
            connection.reply({RESULT: result}, self._clock())

    def after_fork_in_child(self) -> None:
        """Closes what a forked child has inherited; it has a socket of its own once it is instrumented."""
        for listener in (*self._closing, *((self._listener,) if self._listener is not None else ())):
            listener.close()
        for connection in (*self._connections, *self._taken):
            connection.close()
        self._listener, self._path, self.state = None, None, _OFF
        self._closing, self._connections = [], []
        self._taken.clear()
        self._reset()
