"""Starts jobs of several ranks over gloo that hang, each in a way of its own: test_autopsy.py.

Reads a job from each line of stdin, as JSON with ``mode``, ``ranks``, ``folder`` and ``more`` options of a box: forks the ranks, whose boxes
lie in the folder, and answers ``started``. ``wait`` waits for the end of a rank, and the answer is its exit status. An empty line kills them,
and the answer is ``ended``. So does the end of stdin. The ranks are forked from this
process, which has torch, the SDK and this package imported: that takes longer than most jobs do until they hang.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from opentelemetry.sdk.trace import TracerProvider

import otel_torchprof as otp

STUCK = 1
"""The rank that does something else than the others."""
BEFORE = 5
"""Collectives of all ranks before the job hangs."""


def hold() -> None:
    threading.Event().wait()


def skip(rank: int, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """One rank leaves out the first of two collectives."""
    calls = [] if rank == STUCK else [dist.all_reduce(x, async_op=True)]
    return [*calls, dist.broadcast(y, 0, async_op=True)]


def reorder(rank: int, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """One rank calls two collectives the other way round."""
    calls = [lambda: dist.all_reduce(x, async_op=True), lambda: dist.broadcast(y, 0, async_op=True)]
    return [call() for call in (reversed(calls) if rank == STUCK else calls)]


def mismatch(rank: int, x: torch.Tensor, y: torch.Tensor) -> Any:
    """One rank brings a tensor of another size."""
    return dist.all_reduce(y if rank == STUCK else x, async_op=True)


def loader(rank: int, x: torch.Tensor, _: torch.Tensor) -> None:
    """One rank waits for a batch that does not come."""

    def batches() -> Any:
        while True:
            with otp.record_function("load_batch"):
                threading.Event().wait(None if rank == STUCK else 0)
            yield x

    for batch in batches():
        dist.all_reduce(batch)


def dead(rank: int, x: torch.Tensor, _: torch.Tensor) -> None:
    """One rank is killed; the others get an error from gloo, and run on."""
    with otp.record_function("save_checkpoint"):
        if rank == STUCK:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(x)
    finally:  # a rank may wait for one that failed, and not for the killed one: it gets its error from this
        dist.destroy_process_group()


def hog(rank: int, x: torch.Tensor, _: torch.Tensor) -> None:
    """One rank is in a C function that keeps the GIL."""
    if rank == STUCK:
        with otp.record_function("tokenize"):
            ctypes.PyDLL(None).pause()
    dist.all_reduce(x)


def spin(rank: int, x: torch.Tensor, _: torch.Tensor) -> None:
    """One rank computes in Python, and comes to no end."""
    while rank == STUCK:
        pass
    dist.all_reduce(x)


def evaluate(rank: int, x: torch.Tensor, _: torch.Tensor) -> None:
    """One rank does something else for as long as the others wait."""
    with otp.record_function("evaluate"):
        while rank == STUCK:
            with otp.record_function("batch"):
                threading.Event().wait(0.01)
    dist.all_reduce(x)


def cycle(rank: int, x: torch.Tensor, _: torch.Tensor) -> None:
    """Each of three ranks waits for the next one, in a group of two."""
    groups = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])]
    dist.all_reduce(x, group=groups[rank])


def recv(rank: int, x: torch.Tensor, y: torch.Tensor) -> None:
    """The first rank receives from one that waits for it in a collective."""
    if rank == 0:
        dist.recv(y, STUCK)
    dist.all_reduce(x)


def train(rank: int, _x: torch.Tensor, _y: torch.Tensor) -> None:
    """Trains with DistributedDataParallel; one rank's data set stops in the third batch."""

    class Batches(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            if rank == STUCK and index == 2:
                hold()
            return torch.ones(4)

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in torch.utils.data.DataLoader(Batches()):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


MODES = {
    each.__name__: each for each in (skip, reorder, mismatch, loader, dead, hog, spin, evaluate, cycle, recv, train)
}


def run_rank(rank: int, mode: str, ranks: int, folder: str, more: str) -> None:
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["OTEL_TRACES_EXPORTER"] = "none"
    os.environ["OTEL_TORCHPROF_BLACKBOX"] = f"{'steps' if mode == 'train' else 'ops'},1M,{folder}{more}"
    otp.TorchInstrumentor().instrument(tracer_provider=TracerProvider(), detail="steps")
    # They find each other through a file: a port that is free now may be taken a moment later.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    x, y = torch.ones(1000), torch.ones(10)
    for _ in range(BEFORE):
        dist.all_reduce(x)
    kept = None
    try:
        kept = MODES[mode](rank, x, y)
    except RuntimeError:
        traceback.print_exc()
    hold()
    assert kept


def forked(rank: int, job: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        log = os.open(f"{job['folder']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        for number, end in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(end, number)
        run_rank(rank, **job)
    finally:
        traceback.print_exc()
        os._exit(1)


def end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while pids:
        os.waitpid(pids.pop(), 0)


def answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    for name in otp.__all__:
        getattr(otp, name)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{threads}: a fork has only one of them"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # gloo aborts where sizes differ
    pids: list[int] = []
    for line in iter(sys.stdin.readline, ""):
        if line.startswith("{"):
            job = json.loads(line)
            pids += [forked(rank, job) for rank in range(job["ranks"])]
            answer("started")
        elif line == "wait\n":
            pid, status = os.wait()
            pids.remove(pid)
            answer(str(os.waitstatus_to_exitcode(status)))
        else:
            end(pids)
            answer("ended")
    end(pids)


if __name__ == "__main__":
    main()
