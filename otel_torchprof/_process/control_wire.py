"""The control socket of a running process: where it lies, and the lines on it. Server and client both use this module.

A connection has one request: a line of JSON with the version, a verb and its arguments, and perhaps descriptors of files that the
client has opened (``SCM_RIGHTS``, with the first byte). The reply is a line of JSON, after lines of progress. Then the server closes it.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof.errors import TorchProfError

from .private_folder import check_folder, default_folder, made_folder

if TYPE_CHECKING:
    import _socket
    from collections.abc import Iterator, Mapping
    from pathlib import Path

VERSION = 1
"""Version of the requests; server and client of different versions say so."""
VERBS = ("status", "record", "dump")
"""All there are."""
MAX_REQUEST = 64 << 10
"""Bytes of a request, with its line feed."""
MAX_FILES = 4
"""Descriptors that may come with a request."""
SUFFIX = ".sock"
PROGRESS, RESULT, ERROR = "progress", "result", "error"
"""Keys of the lines of a reply: each line is an object with one of them. The last line has a result or an error."""
_SO_PEERCRED = 17
_CREDENTIALS = struct.Struct("3i")


class ControlError(TorchProfError):
    """A request was not understood, or not fulfilled; the message says what to do."""


def is_supported() -> bool:
    """Whether this system has what control sockets need."""
    return sys.platform == "linux"


def request_line(verb: str, arguments: Mapping[str, Any]) -> bytes:
    """Returns a request as it is sent."""
    return line_of({"version": VERSION, "verb": verb, "arguments": dict(arguments)})


def line_of(value: Mapping[str, Any]) -> bytes:
    """Returns a line of JSON."""
    return json.dumps(value, ensure_ascii=True, default=str).encode() + b"\n"


def parsed_request(line: bytes) -> tuple[str, dict[str, Any]]:
    """Returns the verb and the arguments of a request, whose content is not trusted.

    Raises:
        ControlError: it has another form, another version, or a verb that there is not.
    """
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ControlError(f"the request is no line of JSON ({type(error).__name__})") from None
    if not isinstance(request, dict):
        raise ControlError("the request is no object of JSON")
    version, verb, arguments = request.get("version"), request.get("verb"), request.get("arguments", {})
    if version != VERSION:
        raise ControlError(
            f"the request has version {version!r:.40}, this process understands {VERSION}: use the otel-torchprof of its environment"
        )
    if verb not in VERBS:
        raise ControlError(f"the verb is {verb!r:.40}; it must be one of {', '.join(VERBS)}")
    if not isinstance(arguments, dict):
        raise ControlError("the arguments are no object of JSON")
    return verb, arguments


def peer(connection: _socket.socket) -> tuple[int, int]:
    """Returns process id and user of the other end of a connection: for the client, of the process that listens.

    The id is 0 for a process that this one cannot see (of another PID namespace).
    """
    import _socket

    found = connection.getsockopt(_socket.SOL_SOCKET, _SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


def server_folder() -> Path:
    """Makes and checks the folder for the socket of this process.

    Raises:
        FolderError: it cannot be made, or is not private.
    """
    return made_folder(config.CONTROL.read() or "")


def client_folders() -> list[Path]:
    """The folders with sockets that this user may ask: its own; for root, those of all users. Folders that are not private are left out.

    Raises:
        FolderError: the user's own folder exists and is not private.
    """
    if directory := config.CONTROL.read():
        folders, is_default = [made_folder(directory)], False
    else:
        folders, is_default = [default_folder()], True
    if os.geteuid() == 0 and is_default:
        prefix = folders[0].name.rpartition("-")[0]
        others = [path for path in folders[0].parent.glob(f"{prefix}-*") if path.name.rpartition("-")[2].isdecimal()]
        return [path for path in others if _is_private(path)]
    folders = [folder for folder in folders if os.path.lexists(folder)]
    for folder in folders:
        check_folder(folder, is_default=is_default)
    return folders


def _is_private(folder: Path) -> bool:
    try:
        check_folder(folder, is_default=True, user=int(folder.name.rpartition("-")[2]))
    except TorchProfError:
        return False
    return True


@contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """Yields a descriptor of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def address(folder: int, name: str) -> str:
    """Address of a socket in an open folder: short, however long the folder's path is, since an address has 108 bytes at most."""
    return f"/proc/self/fd/{folder}/{name}"
