"""Programs under ``otel-torchprof run --blackbox`` that are killed: the box has what each thread had done, but for one operator."""

from __future__ import annotations

import os
import random
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import preloaded
import pytest

from otel_torchprof._columns.schema import Flag
from otel_torchprof._files import box_file
from otel_torchprof._files.box_reading import read_box

if TYPE_CHECKING:
    from otel_torchprof._native.blackbox import Contents

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("blackbox_deaths_program.py")
DEATHS = int(os.environ.get("BLACKBOX_DEATHS", "12"))
"""100 of them: ``BLACKBOX_DEATHS=100 pytest tests/torch/test_blackbox_deaths.py``."""
KERNEL = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
OPERATOR = "aten::add_"
INDEX_BITS = 38
"""Of an event's id, which end with the number of the event on its thread."""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def ended(contents: Contents, os_tid: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the operators of a thread: of those that had ended, and of the others."""
    batch = contents.batch
    threads = [index for index, thread in enumerate(batch.threads) if thread.os_tid == os_tid]
    is_ours = np.isin(batch["thread"], threads)
    assert {batch.names[name] for name in np.unique(batch["name"][is_ours])} <= {OPERATOR}
    numbers = (batch["id"] & np.uint64((1 << INDEX_BITS) - 1)).astype(np.int64)
    is_open = (batch["flags"] & Flag.UNFINISHED) != 0
    return numbers[is_ours & ~is_open], numbers[is_ours & is_open]


def check_thread(contents: Contents, os_tid: int, counted: int, *, is_all: bool) -> None:
    """Its operators are there without a gap, from the first one where the box has room for all, to the last one that it counted.

    One more may have ended without having been counted, or else one may be open.
    """
    has_ended, is_open = ended(contents, os_tid)
    if not len(has_ended):  # also where all others have been written since: a thread that the system had put aside
        assert counted == 0 or not is_all
        return
    first, last = int(has_ended[0]), int(has_ended[-1])
    assert has_ended.tolist() == list(range(first, last + 1))
    assert first == 1 or not is_all
    assert last - counted in {0, 1}
    assert is_open.tolist() in ([], [last + 1])
    assert last == counted or not len(is_open)


@pytest.mark.parametrize("seed", range(DEATHS))
def test_what_the_box_has_of_each_thread(tmp_path, seed):
    """Of every thread it has the latest operators without a gap, up to the last one that the thread has counted, or the next."""
    chosen = random.Random(seed)
    threads = chosen.randint(1, 4)
    killer = chosen.randint(-1, threads - 1)
    # Then the box has room for 74,000 events only. A smaller one has so few chunks that a drain, which another process holds up
    # for long, can be reading all of them that no thread writes to; what is recorded meanwhile is dropped, and counted.
    is_small = chosen.random() < 1 / 3
    operators = round(10 ** chosen.uniform(*((4.9, 5.1) if is_small else (0, 4.5))))
    counts = tmp_path / "counts"
    counts.write_bytes(bytes(16 * threads))
    words = (str(PROGRAM), str(counts), *map(str, (threads, killer, operators)))
    done = preloaded.run(
        ("-m", "otel_torchprof"),
        *("run", "-q", "-o", "none", "--blackbox", *words),
        environment=environment(OTEL_TORCHPROF_BLACKBOX="ops,4M" if is_small else ""),
        folder=tmp_path,
        has_package=True,
    )
    name = f"{PROGRAM.stem}.otpbox"
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, ""), done.stderr
    assert f"is in {name}: otel-torchprof recover {name}\n" in done.stderr
    contents = read_box(str(tmp_path / name))
    assert (contents.chunks_damaged, contents.dropped, contents.is_closed) == (0, 0, False)
    numbers = struct.unpack(f"{2 * threads}Q", counts.read_bytes())
    for os_tid, counted in zip(numbers[::2], numbers[1::2], strict=True):
        check_thread(contents, os_tid, counted, is_all=not is_small)
    assert (sum(numbers[1::2]) if killer < 0 else numbers[2 * killer + 1]) >= operators


RANKS = """
import os, signal
import torch.distributed as dist
import otel_torchprof as otp

dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()  # the launcher's: rank 0 waits for nothing that dies with rank 1
with otp.record_function(f"of rank {dist.get_rank()}"):
    if dist.get_rank() == 1:
        store.wait(["rank 0 is in its label"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("rank 0 is in its label", "")
    while True:
        signal.pause()
"""


def test_ranks_that_a_launcher_starts(tmp_path):
    """Of two ranks one is killed, and so torchrun ends the other, which is said: each leaves a box with its rank and what it was in."""
    (tmp_path / "train.py").write_text(RANKS)
    words = ("run", "-q", "-o", "none", "--blackbox", "--nproc", "2", "train.py")
    module, options = ("-m", "otel_torchprof"), {"folder": tmp_path, "timeout": 240, "has_package": True}
    done = preloaded.run(module, *words, environment=environment(), **options)
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL) received" in done.stderr
    ended, died = (
        "was ended by SIGTERM, as launchers do when another rank has failed",
        "died without ending its recording",
    )
    # An older kernel forgets how a process ended when the launcher has asked for it, which may be faster than the watcher.
    of_rank_0 = ended if KERNEL >= (6, 15) else f"({ended}|{died})"
    for rank, how in enumerate((of_rank_0, died)):
        name = f"train.rank{rank}.otpbox"
        assert re.search(f"rank {rank} {how}; what it did last is in {re.escape(name)}: ", done.stderr)
        assert f"otel-torchprof recover {name}; to compare the ranks: otel-torchprof autopsy .\n" in done.stderr
        contents = read_box(str(tmp_path / name))
        assert contents.info["rank"] == rank
        is_open = (contents.batch["flags"] & Flag.UNFINISHED) != 0
        assert f"of rank {rank}" in {contents.batch.names[index] for index in contents.batch["name"][is_open]}


GREEDY = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
import torch
import otel_torchprof as otp
otp.TorchInstrumentor().instrument(blackbox=f"ops,{sys.argv[2]}", detail="metrics")
held = []
with otp.record_function("collects"):
    while True:
        held.append(torch.ones(1 << 20))
"""


@pytest.fixture
def small_cgroup():
    """A cgroup whose processes have 500 MB of memory."""
    known = box_file._memory_events().get("memory_events")
    if known is None:
        pytest.skip("this system has no cgroups that count what the kernel kills")
    folder = Path(known).parent / f"otel-torchprof-test-{os.getpid()}"
    limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if "oom_control" in known else ("memory.max",)
    try:
        folder.mkdir()
        for limit in limits:
            if limit != "memory.memsw.limit_in_bytes" or (folder / limit).exists():
                (folder / limit).write_text(str(500 << 20))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"this user may make no cgroup with a limit: {error}")
    yield folder
    folder.rmdir()


def test_a_process_that_the_kernel_kills_for_memory(tmp_path, small_cgroup):
    """An autopsy says that the kernel has killed a process of its cgroup, and what it was in."""
    command = [sys.executable, "-c", GREEDY, small_cgroup, tmp_path]
    done = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    command = [sys.executable, "-m", "otel_torchprof", "autopsy", tmp_path]
    said = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=False).stdout
    assert "the kernel has killed 1 process of its cgroup for lack of memory; last seen at " in said
    assert " in collects" in said
