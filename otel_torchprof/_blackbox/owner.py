"""Whose a black box is: tells a process from others that have its number, or its lock.

The lock of a box's file outlives its process in a child that native code forked, since Python's handlers of forks did not run there. A
lock that no child inherits (``fcntl``'s) would be gone as soon as the process opens and closes its own box. So a box says which
process it is of, and the lock alone counts only where that process cannot be looked for: in another container, on another machine.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_STARTED_AT = 19
"""Of ``/proc/<pid>/stat``, behind the name: the ticks from the start of the machine to that of the process."""
_DEAD = frozenset("ZXx")


def owner_info() -> dict[str, Any]:
    """What the box of this process says of it; empty where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return {"owner": os.getpid(), "started": _stat("/proc/self")[1], "machine": _boot(), "pids": _namespace()}
    return {}


def has_ended(text: bytes) -> bool:
    """Whether the process of a box does not run any more, by the box's info; False where that cannot be known."""
    with suppress(OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        info = json.JSONDecoder().raw_decode(text.decode(errors="replace"))[0]
        if (info["machine"], info["pids"]) == (_boot(), _namespace()):
            return not _runs(int(info["owner"]), info["started"])
    return False


def _runs(pid: int, started: int) -> bool:
    """Also where its main thread has ended and others have not."""
    try:
        state, since = _stat(f"/proc/{pid}")
        if since != started:
            return False
        return state not in _DEAD or any(
            _stat(str(task))[0] not in _DEAD for task in Path(f"/proc/{pid}/task").iterdir()
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stat(folder: str) -> tuple[str, int]:
    """The state of a process or thread, and when it started."""
    words = Path(folder, "stat").read_bytes().rpartition(b")")[2].split()
    return words[0].decode(), int(words[_STARTED_AT])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
