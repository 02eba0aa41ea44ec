"""One of several ranks under torchrun: runs collectives of every kind over gloo, and writes what was recorded of them.

Usage: collective_program.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from jsonl_exporter import JsonLinesExporter
from opentelemetry.sdk.trace import TracerProvider
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import otel_torchprof as otp
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._model.collectives import collective_name

if TYPE_CHECKING:
    from collections.abc import Callable

LATE_RANK, LATE_STEP, STEPS = 3, 2, 4
"""This rank begins to record with this step; all others with the first one."""
LAYOUTS = ("apart", "together")
TEXTS = ("group", "ranks", "backend", "dtype", "reduce_op")


def uneven(rank: int, world: int) -> None:
    """What not all ranks take part in, or not all alike: some backends count it, too."""
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=5)
    if rank == 1:
        dist.recv(torch.empty(3), 0, tag=5)
    dist.monitored_barrier()
    gathered = [torch.empty(2) for _ in range(world)] if rank == 0 else None
    dist.gather(torch.ones(2), gathered)


def every_kind(rank: int, world: int) -> None:
    """A collective of each kind."""
    mine, all_of = torch.ones(4), [torch.empty(4) for _ in range(world)]
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    dist.broadcast(mine, 2)
    dist.all_gather(all_of, mine)
    dist.reduce_scatter(torch.empty(4), all_of)
    dist.all_to_all_single(torch.empty(2 * world), torch.ones(2 * world))
    dist.reduce(mine, 1)
    dist.scatter(mine, all_of if rank == 0 else None)
    dist.barrier()
    functional.all_reduce(mine, "sum", list(range(world))).sum()
    with torch.inference_mode():
        waiting = dist.all_reduce(torch.ones(2, dtype=torch.float64), async_op=True)
    waiting.wait()


def train(model: torch.nn.Module) -> None:
    """Its gradients are reduced by C++ code on autograd's thread."""
    model(torch.ones(2, 8)).sum().backward()


def reported(prof: Any) -> list[dict[str, Any]]:
    """The collectives of a profile, as they began."""
    events, columns = prof.columns, prof.collectives
    batch = prof._batch()
    rows = rows_of(batch, columns["event"])
    found = []
    for at in events["start"][rows].argsort(kind="stable").tolist():
        entry = {name: int(column[at]) for name, column in columns.items()}
        entry |= {name: batch.names[entry[name]] for name in TEXTS}
        found.append({**entry, "name": collective_name(batch.names[int(events["name"][rows[at]])])})
    return found


def recorded(step: Callable[[], None], *, on: bool) -> list[dict[str, Any]]:
    """What a step's profile tells, or would if there were one."""
    if not on:
        step()
        return []
    with otp.profile() as prof:
        step()
    operators = sum(prof._batch().names[name].startswith("c10d::") for name in prof.columns["name"].tolist())
    entries = reported(prof)
    assert operators == len(entries), (operators, entries)  # each has an entry, and nothing else has
    return entries


def traced(folder: Path, layout: str, work: Callable[[], None]) -> None:
    """Runs ``work`` instrumented, and writes its spans."""
    (folder / layout).mkdir(exist_ok=True)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(otp.TorchSpanProcessor(JsonLinesExporter(folder / layout)))
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="ops", ranks=layout)
    work()
    otp.TorchInstrumentor().uninstrument()
    provider.shutdown()


def main(path: str) -> None:
    folder = Path(path)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with otp.profile():  # as instrument() does where a program begins: from here on what is uneven is known
        torch.ones(1)
    pair = dist.new_group([1, LATE_RANK])
    model = DistributedDataParallel(torch.nn.Linear(8, 8))

    def step() -> None:
        every_kind(rank, world)
        uneven(rank, world)
        if rank in {1, LATE_RANK}:
            dist.all_reduce(torch.ones(2), group=pair)
        train(model)

    found = [recorded(step, on=rank != LATE_RANK or number >= LATE_STEP) for number in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters())

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            step()
            optimizer.step()

    for layout in LAYOUTS:
        traced(folder, layout, steps)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
