"""Runs a program of the matrix of faults, several times, and prints a line of JSON for each run.

    python benchmarks/fault_child.py JOB

As many processes as the program has ranks run this together, with RANK and WORLD_SIZE set; the first one prints.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspy_peer
import torch
import torch.distributed as dist
from fault_matrix import Program, matrix
from faults import straggler
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fault_models import Task
    from faults import Fault
    from torch import nn

    from otel_torchprof._answers.findings import Finding

BARE, OURS, TRACEML, PYSPY = "bare", "otel-torchprof", "traceml-ai", "py-spy"
_WARM_UP = 5
_RANK = int(os.environ.get("RANK", "0"))
Step = Callable[["nn.Module"], contextlib.AbstractContextManager[None]]
"""What a contestant wants around each step."""
Loop = Callable[[Step], list[float]]


class Batches(Dataset):
    """The same batch for each step, made as the fault wants it."""

    def __init__(self, task: Task, fault: Fault, count: int) -> None:
        self._task, self._fault, self._count = task, fault, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._fault.load()
        x, y = self._task.inputs, self._task.targets
        more = self._fault.rows_more(number)
        return (torch.cat([x, x[:more]]), torch.cat([y, y[:more]])) if more else (x, y)


def train(task: Task, fault: Fault, steps: int, step: Step) -> list[float]:
    """The loop of all programs; the times at which its iterations began, in ms."""
    model = fault.wrap(task.model)
    if fault.ranks > 1:
        model = fault.distribute(model)
    optimizer = fault.optimizer(task.optimizer, model.parameters())
    batches = Batches(task, fault, steps * task.accumulate)
    loader = DataLoader(batches, batch_size=None, num_workers=fault.workers, collate_fn=fault.collate)
    begins = []
    for number, (x, y) in enumerate(loader):
        begins.append(time.perf_counter() * 1e3)
        with step(model):
            fault.before(number)
            with torch.autocast("cpu", torch.bfloat16, enabled=task.has_autocast):
                loss = task.loss(model(x), y)
            loss.backward()
            fault.reduce(model)
            if number % task.accumulate == task.accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
            fault.after(number, model, x, y)
    return begins


def main(job: dict[str, Any]) -> None:
    """Runs what the job says."""
    torch.set_num_threads(1)
    if job["shared_machine"]:
        _ignore_usage()
    program = next(each for each in matrix(job["half"]) if each.name == job["program"])
    for run in job["runs"]:
        for how in job["contestants"]:
            found = _run(program, run, how, job)
            if _RANK == 0:
                print(json.dumps(found), flush=True)


def _ignore_usage() -> None:
    """Leaves out of recordings how long threads waited for a processor."""
    from otel_torchprof._instrument import live_recording

    live_recording.usage_at = lambda _event: None


def _run(program: Program, run: int, how: str, job: dict[str, Any]) -> dict[str, Any]:
    folder = Path(job["folder"]) / f"{run}-{how}"
    folder.mkdir(exist_ok=True)
    begin = time.perf_counter()
    size, severity, seed = program.parameters(run)
    torch.manual_seed(seed)
    task = program.make(size)
    found: dict[str, Any] = {
        "half": program.half, "program": program.name, "fault": program.fault, "contestant": how, "run": run,
        "size": size, "severity": severity, "seed": seed, "load": os.getloadavg()[0],
    }  # fmt: skip
    with _process_group(program.kind.ranks, folder), program.kind(severity, folder) as fault:
        begins = _CONTESTANTS[how](lambda step: train(task, fault, job["steps"], step), folder, job["detail"])
        if program.kind.ranks > 1:
            dist.barrier()
    times = [after - before for before, after in zip(begins[_WARM_UP:], begins[_WARM_UP + 1 :], strict=False)]
    found["ms_per_step"] = statistics.median(times)
    if how == OURS and _RANK == 0:
        found |= _explained([folder / f"{rank}.json" for rank in range(program.kind.ranks)])
    if how == PYSPY and _RANK == 0:
        found |= pyspy_peer.said(folder)
    found["seconds"] = time.perf_counter() - begin
    if _RANK == 0 and not job["keep"]:
        shutil.rmtree(folder)
    return found


@contextlib.contextmanager
def _process_group(ranks: int, folder: Path) -> Iterator[None]:
    if ranks == 1:
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=_RANK, world_size=ranks)
    yield
    dist.destroy_process_group()


def _bare(loop: Loop, _folder: Path, _detail: str) -> list[float]:
    return loop(lambda _model: contextlib.nullcontext())


def _ours(loop: Loop, folder: Path, detail: str) -> list[float]:
    import otel_torchprof as otp

    with otp.stream(otp.ChromeTraceExporter(folder / f"{_RANK}.json"), detail=detail):
        return _bare(loop, folder, detail)


def _traceml(loop: Loop, _folder: Path, _detail: str) -> list[float]:
    import traceml_ai

    traceml_ai.init(mode="auto")
    return loop(traceml_ai.trace_step)


def _pyspy(loop: Loop, folder: Path, _detail: str) -> list[float]:
    with contextlib.ExitStack() as stack:
        begun = cache(lambda: stack.enter_context(pyspy_peer.sampled(folder)))  # not before the first step
        return loop(lambda _model: contextlib.nullcontext(begun()))


_CONTESTANTS = {BARE: _bare, OURS: _ours, TRACEML: _traceml, PYSPY: _pyspy}


def _explained(paths: list[Path]) -> dict[str, Any]:
    """What is said of the recording."""
    import otel_torchprof as otp

    found = otp.explain(*paths)
    return {
        "verdicts": [_verdict(each) for each in found.faults],
        "lines": {_verdict(each): _text_of(each.line) for each in found.faults if each.line},
        "causes": {_verdict(each): each.cause for each in found.faults if each.cause},
        "sentences": [each.sentence for each in found.faults],
        "headline": found.headline,
        "notes": [each.sentence for each in found.notes],
        "abstentions": [each.reason for each in found.abstentions],
        "steady_steps": found.steady_steps,
        "phases": {each.phase: each.share for each in found.phases},
        "problems": list(found.problems),
    }


def _verdict(found: Finding) -> str:
    return straggler(_number(found.ranks[0])) if found.verdict == "straggler" else found.verdict


def _text_of(line: str) -> str:
    """The text of a line of the matrix, given as ``FILE:LINE FUNCTION``."""
    file, _, number = line.partition(" ")[0].rpartition(":")
    return linecache.getline(str(Path(__file__).with_name(Path(file).name)), int(number or 0)).strip()


def _number(rank: str) -> int:
    """Of a rank that is named "rank 2", or by its file, "2.json"."""
    return int(rank.removeprefix("rank ").removesuffix(".json"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
