"""How much memory this process may still take: what the machine has free, or what its control groups or limits leave, if that is less."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from pathlib import Path
from typing import NamedTuple

_UNKNOWN = 4 << 30
"""Bytes to assume where the system does not say."""


class _Version(NamedTuple):
    """Where a version of control groups is mounted, and the names of its files."""

    root: str
    limit: str
    used: str
    reclaimable: str


_V2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = _Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory(system: Path = Path("/")) -> int:
    """Bytes of memory that the system can still give to this process. Reads some ten small files.

    ``system``: folder with ``proc`` and ``sys``. A control group's page cache that was not used lately counts as free, as
    in ``MemAvailable`` of the machine: reading a file must not make the memory for its columns smaller.
    """
    return min([_free_of_machine(system), *_free_of_groups(system), *_free_of_limits(system)])


def _free_of_limits(system: Path) -> list[int]:
    """What the limits of the process (``ulimit -v`` and ``-d``) leave."""
    free: list[int] = []
    with contextlib.suppress(OSError):
        status = (system / "proc/self/status").read_text("utf-8", "surrogateescape")
        for name, limit in (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA)):
            used, most = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE), resource.getrlimit(limit)[0]
            if used and most != resource.RLIM_INFINITY:
                free.append(max(most - (int(used[1]) << 10), 0))
    return free


def _free_of_machine(system: Path) -> int:
    try:
        match = re.search(r"^MemAvailable: +(\d+) kB$", (system / "proc/meminfo").read_text("utf-8"), re.MULTILINE)
        if match:
            return int(match[1]) << 10
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return _UNKNOWN


def _free_of_groups(system: Path) -> list[int]:
    """What each of the groups that this process is in leaves, and those around them."""
    free: list[int] = []
    with contextlib.suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines():
            _number, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            version = _V1 if controllers else _V2
            root = system / version.root
            group = root / path.lstrip("/")
            # A container sees its own group as the root, and perhaps not the folder that its path names outside.
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    free += _left(folder, version)
    return free


def _left(group: Path, version: _Version) -> list[int]:
    """Bytes that a group has left; nothing if it has no limit, or is none that this process sees."""
    try:
        limit, used = (int((group / name).read_text("utf-8")) for name in (version.limit, version.used))
        match = re.search(rf"^{version.reclaimable} (\d+)$", (group / "memory.stat").read_text("utf-8"), re.MULTILINE)
    except (OSError, ValueError):  # ValueError: the limit is "max"
        return []
    return [max(limit - used + (int(match[1]) if match else 0), 0)]
