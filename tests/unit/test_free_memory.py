"""How much memory a process may take: the least of what its machine has free and its control groups leave."""

from __future__ import annotations

import resource

import pytest

from otel_torchprof._process.free_memory import free_memory

GIB = 1 << 30
V1, V2 = "memory", ""
NAMES = {V1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), V2: ("memory.max", "memory.current")}
UNLIMITED = {V1: 9223372036854771712, V2: "max"}


@pytest.fixture
def machine(tmp_path):
    """A machine with 64 GiB free, whose folders a test may change."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {64 * GIB // 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("")
    return tmp_path


def group(machine, version: str, path: str, limit: object, *, used: int = 0, inactive: int = 0) -> None:
    """Makes a control group with a limit, of which so much is used and so much of that is page cache that nobody needs."""
    folder = machine / "sys/fs/cgroup" / version / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(NAMES[version], (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    name = "total_inactive_file" if version else "inactive_file"
    (folder / "memory.stat").write_text(f"cache 7\n{name} {inactive}\nunevictable 0\n")


def is_in(machine, version: str, path: str) -> None:
    """Puts the process into a group, beside one of another controller."""
    (machine / "proc/self/cgroup").write_text(f"9:name=systemd:/elsewhere\n4:{version}:/{path}\n0::/{path}\n")


def test_without_groups_it_is_what_the_machine_has_free(machine):
    """A machine without control groups, or with ones that this process does not see, gives what the system says."""
    assert free_memory(machine) == 64 * GIB
    is_in(machine, V1, "outside/seen")
    assert free_memory(machine) == 64 * GIB


@pytest.mark.parametrize("version", [V1, V2])
def test_a_group_leaves_its_limit_without_what_is_used(machine, version):
    """Used page cache that is inactive counts as free."""
    group(machine, version, "job", 8 * GIB, used=5 * GIB, inactive=2 * GIB)
    is_in(machine, version, "job")
    assert free_memory(machine) == 5 * GIB


@pytest.mark.parametrize("version", [V1, V2])
def test_the_narrowest_group_counts(machine, version):
    """Groups around that of the process limit it too; one without a limit does not."""
    group(machine, version, "", UNLIMITED[version])
    group(machine, version, "pod", 2 * GIB, used=GIB)
    group(machine, version, "pod/job", UNLIMITED[version])
    is_in(machine, version, "pod/job")
    assert free_memory(machine) == GIB


@pytest.mark.parametrize("version", [V1, V2])
def test_a_container_whose_root_is_its_group_is_limited(machine, version):
    """The path of the group names a folder outside, which is not there; the root has the container's own limit."""
    group(machine, version, "", 4 * GIB, used=GIB)
    is_in(machine, version, "docker/0123")
    assert free_memory(machine) == 3 * GIB


def test_a_group_that_is_full_leaves_nothing(machine):
    """More in use than the limit is no negative number of bytes."""
    group(machine, V2, "job", GIB, used=2 * GIB)
    is_in(machine, V2, "job")
    assert free_memory(machine) == 0


def test_a_system_that_says_nothing_has_some_memory(tmp_path):
    """Without ``/proc`` it is what the C library says, or a guess."""
    assert free_memory(tmp_path) > 0


def test_limits_of_the_process(machine, monkeypatch):
    """``ulimit -v`` and ``-d`` leave what of them is not used; unlimited ones count for nothing."""
    (machine / "proc/self/status").write_text("VmSize:\t 1048576 kB\nVmData:\t  524288 kB\n")
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: 2 * GIB}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], 0))
    assert free_memory(machine) == 3 * GIB // 2
    limits[resource.RLIMIT_AS] = GIB // 2
    assert free_memory(machine) == 0
