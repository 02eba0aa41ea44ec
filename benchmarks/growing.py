"""Precision and recall of ``memory-growth``: programs that leak and programs that do not, each in a process of its own.

The thresholds were chosen on the programs of the half ``making``; those of the half ``judging`` were run once, afterwards.
``python benchmarks/growing.py judging`` prints a row per program, and precision and recall.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import queue
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEPS, BATCH, WIDTH = 240, 64, 256
PROGRAMS: dict[str, Program] = {}


class Program(NamedTuple):
    """A training loop; ``run`` is a generator that yields at the end of each step."""

    half: str
    leaks: bool
    run: Callable[[], Iterator[None]]


def program(half: str, *, leaks: bool) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    """Adds a program."""

    def added(run: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        PROGRAMS[run.__name__] = Program(half, leaks, run)
        return run

    return added


class Loop:
    """A small model with its optimizer, and batches."""

    def __init__(self, *, adam: bool = False) -> None:
        import torch

        self.torch = torch
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()
        )
        make = torch.optim.Adam if adam else torch.optim.SGD
        self.optimizer = make(self.model.parameters(), lr=1e-3)

    def batch(self, rows: int = BATCH) -> Any:
        return self.torch.randn(rows, WIDTH)

    def step(self, x: Any) -> Any:
        """A step of training; the loss."""
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


making, judging = functools.partial(program, "making"), functools.partial(program, "judging")


# ---- programs that leak, for making ----


@making(leaks=True)
def losses_with_graphs() -> Iterator[None]:
    loop, losses = Loop(), []
    for _ in range(STEPS):
        losses.append(loop.model(loop.batch()).mean())  # with its graph: it is never run backward
        loop.step(loop.batch())
        yield


@making(leaks=True)
def growing_cache() -> Iterator[None]:
    loop, cache = Loop(), {}
    for number in range(STEPS):
        x = loop.batch()
        cache[number] = x * 2
        loop.step(x)
        yield


@making(leaks=True)
def hook_keeps_outputs() -> Iterator[None]:
    loop, outputs = Loop(), []
    loop.model[0].register_forward_hook(lambda _module, _args, output: outputs.append(output.detach()))
    for _ in range(STEPS):
        loop.step(loop.batch())
        yield


@making(leaks=True)
def log_keeps_outputs() -> Iterator[None]:
    loop, log = Loop(adam=True), []
    for number in range(STEPS):
        x = loop.batch()
        loss = loop.step(x)
        log.append({"step": number, "loss": loss.item(), "input": x[:16].clone()})
        yield


@making(leaks=True)
def loader_copies() -> Iterator[None]:
    loop = Loop()

    class Decoded(loop.torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def __len__(self) -> int:
            return STEPS * 16

        def __getitem__(self, _index: int) -> Any:
            self.seen.append(loop.torch.randn(WIDTH))
            return self.seen[-1]

    for x in loop.torch.utils.data.DataLoader(Decoded(), batch_size=16):
        loop.step(x)
        yield


@making(leaks=True)
def snapshots() -> Iterator[None]:
    loop, kept = Loop(), []
    for number in range(STEPS):
        loop.step(loop.batch())
        if number % 5 == 0:
            kept.append(copy.deepcopy(loop.model.state_dict()))
        yield


# ---- programs that do not, for making ----


@making(leaks=False)
def plain() -> Iterator[None]:
    loop = Loop()
    for _ in range(STEPS):
        loop.step(loop.batch())
        yield


@making(leaks=False)
def accumulation() -> Iterator[None]:
    loop = Loop(adam=True)
    for _ in range(STEPS):
        for _ in range(4):
            loop.model(loop.batch()).square().mean().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        yield


@making(leaks=False)
def evaluation_in_between() -> Iterator[None]:
    loop = Loop()
    for number in range(STEPS):
        loop.step(loop.batch())
        if number % 20 == 19:
            loop.model.eval()
            with loop.torch.no_grad():
                outputs = [loop.model(loop.batch(512)) for _ in range(10)]
            loop.torch.cat(outputs).mean().item()
            loop.model.train()
        yield


@making(leaks=False)
def replay_buffer() -> Iterator[None]:
    loop, buffer = Loop(), deque(maxlen=100)
    for _ in range(STEPS):
        buffer.append(loop.batch())
        loop.step(buffer[len(buffer) // 2])
        yield


@making(leaks=False)
def caches_first_epoch() -> Iterator[None]:
    loop, cache = Loop(), {}
    for _ in range(5):
        for index in range(STEPS // 5):
            if index not in cache:
                cache[index] = loop.batch()
            loop.step(cache[index])
            yield


@making(leaks=False)
def variable_shapes() -> Iterator[None]:
    loop = Loop()
    rows = loop.torch.randint(8, 512, (STEPS,)).tolist()
    for count in rows:
        loop.step(loop.batch(count))
        yield


# ---- programs that leak, for judging ----


@judging(leaks=True)
def validation_with_gradients() -> Iterator[None]:
    loop, total = Loop(adam=True), 0.0
    for _ in range(STEPS):
        loop.step(loop.batch())
        total = total + loop.model(loop.batch(32)).abs().mean()
        yield


@judging(leaks=True)
def unbounded_lru_cache() -> Iterator[None]:
    loop = Loop()

    @functools.cache
    def features(_index: int) -> Any:
        return loop.batch(48).cumsum(0)

    for number in range(STEPS):
        loop.step(features(number))
        yield


@judging(leaks=True)
def gradient_hooks() -> Iterator[None]:
    loop, gradients = Loop(), []
    loop.model[2].weight.register_hook(lambda gradient: gradients.append(gradient.clone()))
    for _ in range(STEPS):
        loop.step(loop.batch())
        yield


@judging(leaks=True)
def state_is_never_detached() -> Iterator[None]:
    loop = Loop()
    cell = loop.torch.nn.GRUCell(WIDTH, WIDTH)
    optimizer = loop.torch.optim.SGD(cell.parameters(), lr=1e-6)
    state, outputs = loop.torch.zeros(16, WIDTH), []
    for _ in range(120):
        state = cell(loop.batch(16), state)
        outputs.append(state)
        cell(loop.batch(16), state.detach()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@judging(leaks=True)
def unbounded_queue() -> Iterator[None]:
    loop, batches, wanted = Loop(), queue.Queue(), queue.Queue()

    def produce() -> None:
        while wanted.get():
            for _ in range(2):  # twice as fast as they are taken
                batches.put(loop.batch())

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    for _ in range(STEPS):
        wanted.put(True)
        loop.step(batches.get())
        yield
    wanted.put(False)
    producer.join()


@judging(leaks=True)
def predictions_as_lists() -> Iterator[None]:
    loop, predictions = Loop(), []
    for _ in range(STEPS):
        x = loop.batch()
        loop.step(x)
        with loop.torch.no_grad():
            predictions.append(loop.model(x)[:16].tolist())
        yield


@judging(leaks=True)
def kept_exceptions() -> Iterator[None]:
    loop, errors = Loop(adam=True), []

    def checked(x: Any) -> None:
        large = x.repeat(2, 1)
        if large.numel():
            raise ValueError("not finite")

    for _ in range(STEPS):
        x = loop.batch()
        try:
            checked(x)
        except ValueError as error:
            errors.append(error)
        loop.step(x)
        yield


@judging(leaks=True)
def evaluations_are_kept() -> Iterator[None]:
    loop, results = Loop(), []
    for number in range(STEPS):
        loop.step(loop.batch())
        if number % 12 == 11:
            loop.model.eval()
            with loop.torch.no_grad():
                results.append(loop.model(loop.batch(1024)))
            loop.model.train()
        yield


# ---- programs that do not, for judging ----


@judging(leaks=False)
def convolutions() -> Iterator[None]:
    loop = Loop()
    nn = loop.torch.nn
    loop.model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten())
    loop.optimizer = loop.torch.optim.AdamW(loop.model.parameters())
    for _ in range(STEPS):
        loop.step(loop.torch.randn(8, 3, 32, 32))
        yield


@judging(leaks=False)
def averaged_weights() -> Iterator[None]:
    loop = Loop(adam=True)
    averaged = loop.torch.optim.swa_utils.AveragedModel(loop.model)
    scheduler = loop.torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, STEPS)
    for _ in range(STEPS):
        loop.step(loop.batch())
        averaged.update_parameters(loop.model)
        scheduler.step()
        yield


@judging(leaks=False)
def window_of_batches() -> Iterator[None]:
    loop, window = Loop(), deque(maxlen=60)
    for _ in range(STEPS):
        window.append(loop.step(loop.batch()).detach() + loop.batch())
        yield


@judging(leaks=False)
def ragged_sequences() -> Iterator[None]:
    loop = Loop()
    lengths = loop.torch.randint(4, 120, (STEPS, 8))
    for row in lengths.tolist():
        rows = loop.torch.nn.utils.rnn.pad_sequence([loop.torch.randn(length, WIDTH) for length in row])
        loop.step(rows.flatten(0, 1))
        yield


@judging(leaks=False)
def checkpoints() -> Iterator[None]:
    loop = Loop(adam=True)
    for number in range(STEPS):
        loop.step(loop.batch())
        if number % 30 == 29:
            loop.torch.save({"model": loop.model.state_dict(), "state": loop.optimizer.state_dict()}, io.BytesIO())
        yield


@judging(leaks=False)
def cycles_of_references() -> Iterator[None]:
    loop = Loop()
    for _ in range(STEPS):
        holder: dict[str, Any] = {"batch": loop.batch(16)}
        holder["self"] = [holder, *([] for _ in range(60))]
        loop.step(loop.batch())
        yield


@judging(leaks=False)
def loader_with_a_worker() -> Iterator[None]:
    loop = Loop()
    data = loop.torch.utils.data.TensorDataset(loop.torch.randn(STEPS * 16, WIDTH))
    for (x,) in loop.torch.utils.data.DataLoader(data, batch_size=16, num_workers=1):
        loop.step(x)
        yield


@judging(leaks=False)
def metrics_of_each_epoch() -> Iterator[None]:
    loop = Loop()
    for _ in range(8):
        outputs = []
        for _ in range(STEPS // 8):
            x = loop.batch()
            loop.step(x)
            outputs.append(loop.model(x).detach())
            yield
        loop.torch.cat(outputs).std().item()


@judging(leaks=False)
def bounded_prefetch() -> Iterator[None]:
    loop, batches = Loop(), queue.Queue(maxsize=16)

    def produce() -> None:
        for _ in range(STEPS):
            batches.put(loop.batch(128))

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    for _ in range(STEPS):
        loop.step(batches.get())
        yield
    producer.join()


@judging(leaks=False)
def buffer_of_transitions() -> Iterator[None]:
    loop = Loop()
    buffer, filled = loop.torch.empty(110 * BATCH, WIDTH), 0  # pages are touched as it fills
    for number in range(STEPS):
        at = number % 110
        buffer[at * BATCH : (at + 1) * BATCH] = loop.batch()
        filled = min(filled + 1, 110)
        loop.step(buffer[: filled * BATCH][-BATCH:])
        yield


# ---- running them ----


def run(name: str, folder: str) -> dict[str, Any]:
    """Runs a program in this process, with steps recorded; the findings."""
    import otel_torchprof as otp

    path = str(Path(folder) / f"{name}.json")
    with otp.stream(otp.ChromeTraceExporter(path), detail="steps") as stream:
        for _ in PROGRAMS[name].run():
            stream.step()
    explanation = otp.explain(path)
    grown = [finding for finding in explanation.findings if finding.verdict == "memory-growth"]
    return {"grows": bool(grown), "statement": grown[0].statement if grown else "", "steps": explanation.steps}


def in_child(name: str, folder: str) -> dict[str, Any]:
    """The same in a forked child: starting Python and torch takes longer than a program."""
    result = Path(folder) / "result.json"
    result.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            result.write_text(json.dumps(run(name, folder)))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return dict(json.loads(result.read_text())) if result.exists() else {"grows": None, "statement": "failed"}


def main(half: str) -> None:
    """Runs the programs of a half, and prints the table."""
    import torch  # noqa: F401 - before the forks

    import otel_torchprof  # noqa: F401

    right, found = {True: 0, False: 0}, 0
    names = [name for name, each in PROGRAMS.items() if each.half == half]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            result, leaks = in_child(name, folder), PROGRAMS[name].leaks
            right[leaks] += result["grows"] is leaks
            found += bool(result["grows"])
            is_right = "right" if result["grows"] is leaks else "WRONG"
            what = "leaks" if leaks else "does not leak"
            print(f"{name:28} {what:14} {is_right} {result['statement']}", flush=True)
    leaking = sum(PROGRAMS[name].leaks for name in names)
    silent = f"silent on {right[False]} of {len(names) - leaking}"
    print(f"precision {right[True]} of {found}, recall {right[True]} of {leaking}, {silent}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1])
