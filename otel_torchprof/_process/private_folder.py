"""The folder of the user's alone: black boxes and control sockets of the processes of a machine are in it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from otel_torchprof.errors import TorchProfError

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a folder of the user's alone is made in it


class FolderError(TorchProfError):
    """A folder is not there, or not private; the message has the reason."""


def default_folder(user: int | None = None) -> Path:
    """The default folder of a user, by default of this one."""
    return Path(_SHARED_MEMORY) / f"otel-torchprof-{os.geteuid() if user is None else user}"


def made_folder(directory: str) -> Path:
    """Creates and checks a folder; empty: the default one.

    Raises:
        FolderError: other users can write to it, or the default one is a link.
    """
    try:
        folder = Path(directory).expanduser() if directory else default_folder()
    except RuntimeError as error:  # there is no such user
        raise FolderError(f"{directory} cannot be made: {error}; name another folder") from error
    try:
        if directory:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
    except OSError as error:
        raise FolderError(f"{folder} cannot be made: {error.strerror}; name another folder") from error
    check_folder(folder, is_default=not directory)
    return folder


def check_folder(folder: Path, *, is_default: bool, user: int | None = None) -> None:
    """Checks that only its user can write to a folder.

    Args:
        folder: its path.
        is_default: whether nobody else may read it either, and it may be no link.
        user: its owner, by default this user.

    Raises:
        FolderError: it is not so; an OSError of the system is its cause.
    """
    try:
        info = folder.lstat() if is_default else folder.stat()
    except OSError as error:
        raise FolderError(f"{folder} cannot be read: {error.strerror}; name another folder") from error
    if not stat.S_ISDIR(info.st_mode):
        raise FolderError(f"{folder} is no folder; remove it, or name another")
    owner = os.geteuid() if user is None else user
    if info.st_uid != owner or (is_default and info.st_mode & 0o077) or info.st_mode & stat.S_IWOTH:
        raise FolderError(f"{folder} belongs to somebody else, or others can write to it; name another folder")
