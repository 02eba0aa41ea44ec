"""The faults that are injected into training programs: what each changes of the loop, and which verdicts on it are right."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import Self

LATE_RANK = 2
_EVERY, _GROWS_EVERY = 20, 10
_SPIN = "import sys\nprint(flush=True)\nwhile True: {}"


class Fault:
    """The training loop without a fault; what follows changes a part of it.

    Args:
        severity: how bad it is; each fault says in which unit.
        folder: for its files.
    """

    right: frozenset[str] = frozenset()
    """Verdicts that name the fault."""
    also: frozenset[str] = frozenset()
    """Verdicts that are true beside these, and count neither as right nor as wrong."""
    lines: tuple[str, ...] = ()
    """Parts of the lines of which one is the cause; none if no line of the loop's is."""
    ranks = 1
    workers = 0
    """Of the loader."""

    def __init__(self, severity: float, folder: Path) -> None:
        self.severity = severity
        self.folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def load(self) -> None:
        """Called for each batch, where the loader makes it."""

    def rows_more(self, _number: int) -> int:
        """By how many rows a batch is larger than the first."""
        return 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model that is trained."""
        return model

    def distribute(self, model: nn.Module) -> nn.Module:
        """The same, with gradients that are averaged over ranks."""
        return DistributedDataParallel(model)

    def before(self, number: int) -> None:
        """Called before the forward pass."""

    def reduce(self, model: nn.Module) -> None:
        """Called after the backward pass."""

    def collate(self, batch: Any) -> Any:
        """Called for each batch that the loader has made."""
        return batch

    def optimizer(self, make: Callable[..., torch.optim.Optimizer], parameters: Any) -> torch.optim.Optimizer:
        """The optimizer of some parameters."""
        return make(parameters)

    def after(self, number: int, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        """Called after the step of the optimizer."""


def spin(seconds: float) -> None:
    """Computes in Python for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def straggler(rank: int) -> str:
    """The verdict that this rank is late: a different one if it is not."""
    return "straggler" if rank == LATE_RANK else f"straggler (rank {rank}, which is not late)"


class TwoRanks(Fault):
    """No fault: two ranks that are equally fast."""

    ranks = 2


class SlowLoader(Fault):
    """Each batch is decoded for so many seconds, by the loop's own thread."""

    right = frozenset(("input-bound",))
    lines = ("while time.perf_counter() < end", "time.perf_counter() + seconds")

    def load(self) -> None:
        spin(self.severity)


class CompressedLoader(SlowLoader):
    """Each batch is so many MB to decompress."""

    lines = ("zlib.decompress(",)

    def __init__(self, severity: float, folder: Path) -> None:
        super().__init__(severity, folder)
        self._batch = zlib.compress(os.urandom(1 << 10) * int(severity * 1024))

    def load(self) -> None:
        zlib.decompress(self._batch)


class StarvedWorkers(Fault):
    """Two workers wait for storage, so many seconds for a batch."""

    right = frozenset(("input-bound",))
    lines = ("in enumerate(loader)",)
    workers = 2

    def load(self) -> None:
        time.sleep(self.severity)


class BusyWorkers(StarvedWorkers):
    """Two workers compute for so many seconds for a batch: beside the loop, more processes than a small machine has processors."""

    also = frozenset(("machine-busy",))

    def load(self) -> None:
        spin(self.severity)


class SortingWorkers(BusyWorkers):
    """Two workers sort so many elements for a batch."""

    def load(self) -> None:
        torch.rand(int(self.severity)).sort()


class GilHog(Fault):
    """Another thread computes in Python for so many seconds, pauses for a millisecond, and continues."""

    right = frozenset(("gil", "python-gap"))
    pause = 0.001

    def __enter__(self) -> Self:
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hog")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended.wait(self.pause):
            self.work()

    def work(self) -> None:
        spin(self.severity)


class JsonHog(GilHog):
    """Another thread writes JSON in one call of C, which does not yield the GIL: so many rows."""

    def __init__(self, severity: float, folder: Path) -> None:
        super().__init__(severity, folder)
        self._rows = [{"name": str(number), "values": [0.5] * 20} for number in range(int(severity))]

    def work(self) -> None:
        json.dumps(self._rows)


class CollectionStorm(Fault):
    """Each step collects garbage, with so many objects alive."""

    right = frozenset(("gc-bound",))
    lines = ("gc.collect()",)

    def __enter__(self) -> Self:
        gc.freeze()  # torch's own objects would make a collection ten times longer
        self._alive = [self.alive(number) for number in range(int(self.severity))]
        return self

    def __exit__(self, *_: object) -> None:
        self._alive.clear()
        gc.unfreeze()

    def alive(self, number: int) -> object:
        return [number]

    def before(self, _number: int) -> None:
        gc.collect()


class CollectionInForward(CollectionStorm):
    """The model collects garbage in its forward pass, with so many dictionaries alive."""

    lines = ("self.function()",)

    def alive(self, number: int) -> object:
        return {"number": [number]}

    def before(self, number: int) -> None:
        pass

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(Calling(gc.collect), model)


class Calling(nn.Module):
    """Passes its input on, after a call."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.function()
        return x


class BusyNeighbour(Fault):
    """So many processes per core spin."""

    right = frozenset(("machine-busy",))
    work = "pass"

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", _SPIN.format(self.work)]
        count = int(self.severity * (os.cpu_count() or 1))
        self._processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
        for each in self._processes:
            assert each.stdout is not None
            each.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._processes:
            each.kill()
            each.communicate()


class SortingNeighbour(BusyNeighbour):
    """So many processes per core sort."""

    work = "sorted(range(100_000, 0, -1))"


class SlowOperator(Fault):
    """The model sorts so many elements."""

    right = frozenset(("operator-bound",))
    lines = ("self.function()",)

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(Calling(torch.rand(int(self.severity)).sort), model)


class SlowDecomposition(SlowOperator):
    """The loop looks at the singular values of a matrix of so many rows."""

    lines = ("torch.linalg.svdvals(",)

    def __enter__(self) -> Self:
        self._matrix = torch.randn(int(self.severity), int(self.severity))
        return self

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def before(self, _number: int) -> None:
        torch.linalg.svdvals(self._matrix)


class Recompilation(Fault):
    """Batches become so many rows longer every 10 steps, and the model is compiled for each length."""

    right = frozenset(("compile-bound",))
    also = frozenset(("memory-growth",))  # all that was compiled stays
    lines = ("task.loss(model(x), y)",)
    backend = "aot_eager"

    def __enter__(self) -> Self:
        torch._dynamo.reset()  # noqa: SLF001 - its name; and not while it is recorded
        torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - with fewer it stops compiling
        return self

    def rows_more(self, number: int) -> int:
        return int(self.severity) * (number // _GROWS_EVERY)

    def wrap(self, model: nn.Module) -> nn.Module:
        return torch.compile(model, backend=self.backend, dynamic=False)  # type: ignore[return-value]


class DynamoRecompilation(Recompilation):
    """The same, with a backend that compiles nothing: what is left is the tracing of the model."""

    backend = "eager"


class Checkpoints(Fault):
    """A checkpoint of so many MB every 20 steps."""

    right = frozenset(("checkpoint-bound",))
    lines = ("torch.save(",)

    def __enter__(self) -> Self:
        self._more = torch.randn(int(self.severity * 250_000))
        return self

    def after(self, number: int, model: nn.Module, *_: torch.Tensor) -> None:
        if number % _EVERY == _EVERY - 1:
            torch.save({"model": model.state_dict(), "more": self._more}, self.folder / "model.pt")


class SplitCheckpoints(Checkpoints):
    """The same in four files."""

    def after(self, number: int, model: nn.Module, *_: torch.Tensor) -> None:
        if number % _EVERY == _EVERY - 1:
            torch.save(model.state_dict(), self.folder / "model.pt")
            for part, piece in enumerate(self._more.chunk(3)):
                torch.save(piece.clone(), self.folder / f"optimizer{part}.pt")


class Evaluations(Fault):
    """An evaluation of so many batches every 20 steps."""

    right = frozenset(("evaluation-bound",))
    lines = ("self.measure(model(x))", ".item()")

    def after(self, number: int, model: nn.Module, x: torch.Tensor, _y: torch.Tensor) -> None:
        if number % _EVERY == _EVERY - 1:
            model.eval()
            with self.without_gradients():
                for _ in range(int(self.severity)):
                    self.measure(model(x))
            model.train()

    def without_gradients(self) -> Any:
        return torch.no_grad()

    def measure(self, found: torch.Tensor) -> None:
        pass


class MeasuringEvaluations(Evaluations):
    """The same in inference mode, with a figure of each batch."""

    def without_gradients(self) -> Any:
        return torch.inference_mode()

    def measure(self, found: torch.Tensor) -> None:
        found.abs().mean().item()


class LateRank(Fault):
    """One rank of four comes so many seconds late to each backward pass of DistributedDataParallel."""

    right = frozenset(("straggler",))
    lines = ("time.sleep(self.severity)",)
    also = frozenset(("communication-bound",))
    ranks = 4

    def before(self, _number: int) -> None:
        if dist.get_rank() == LATE_RANK:
            time.sleep(self.severity)


class LateLoader(Fault):
    """One rank of four waits so many seconds for each batch, and gradients are averaged one after another."""

    right = frozenset(("straggler",))
    lines = ("time.sleep(self.severity)",)
    also = frozenset(("communication-bound", "input-bound"))
    ranks = 4

    def load(self) -> None:
        if dist.get_rank() == LATE_RANK:
            time.sleep(self.severity)

    def distribute(self, model: nn.Module) -> nn.Module:
        return model

    def reduce(self, model: nn.Module) -> None:
        for each in model.parameters():
            dist.all_reduce(each.grad)


class AllocationChurn(Fault):
    """Each step takes so many MB of memory anew, 4 MB at a time, and frees them."""

    right = frozenset(("operator-bound", "allocation-churn"))
    lines = ("torch.zeros(1_000_000)",)

    def churn(self) -> None:
        pieces = [torch.zeros(1_000_000) for _ in range(int(self.severity / 4))]
        del pieces

    def after(self, *_: object) -> None:
        self.churn()


class ChurnInForward(AllocationChurn):
    """The same in the model's forward pass, as copies of one tensor."""

    lines = ("self._source.clone()",)

    def __enter__(self) -> Self:
        self._source = torch.randn(2_000_000)
        return self

    def churn(self) -> None:
        pieces = [self._source.clone() for _ in range(int(self.severity / 8))]
        del pieces

    def after(self, *_: object) -> None:
        pass

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(Calling(self.churn), model)


class ItemOfElements(Fault):
    """So many elements of the input are read one by one.

    On a CPU, ``.item()`` waits for nothing and takes about a microsecond: it has to be called often to cost anything. What
    it costs then is time between operators, or that of the operators that pick the elements.
    """

    right = frozenset(("python-gap", "operator-bound"))
    lines = ("elements[place % len(elements)].item()",)

    def after(self, _number: int, _model: nn.Module, x: torch.Tensor, _y: torch.Tensor) -> None:
        elements = x.flatten()
        total = 0.0
        for place in range(int(self.severity)):
            total += elements[place % len(elements)].item()


class ItemOfNorms(ItemOfElements):
    """The norms of so many pieces of gradients are logged, each with a call of its own."""

    lines = ("piece.norm().item()",)

    def after(self, *_: object) -> None:
        pass

    def reduce(self, model: nn.Module) -> None:
        gradients = torch.cat([each.grad.flatten() for each in model.parameters()])
        norms = [piece.norm().item() for piece in gradients[:100_000].chunk(int(self.severity))]
        assert norms


class BlockingLog(Fault):
    """Each step writes so many MB of log and waits until the disk has them."""

    right = frozenset(("python-gap",))
    lines = ("self._file.write(self._line)", "self._file.flush()", "os.fsync(")

    def __enter__(self) -> Self:
        self._file = (self.folder / "train.log").open("wb")
        self._line = b"step\n" * int(self.severity * 200_000)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def after(self, *_: object) -> None:
        self._file.write(self._line)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.seek(0)


class SlowHandler(Fault):
    """Each step logs a line to a handler that takes so many seconds, as one does that sends it."""

    right = frozenset(("python-gap",))
    lines = ("time.sleep(self.seconds)",)

    class _Handler(logging.Handler):
        seconds = 0.0

        def emit(self, _record: logging.LogRecord) -> None:
            time.sleep(self.seconds)

    def __enter__(self) -> Self:
        self._log = logging.getLogger("faulty.training")
        self._log.propagate = False
        self._log.setLevel(logging.INFO)
        self._handler = self._Handler()
        self._handler.seconds = self.severity
        self._log.addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self._handler)

    def after(self, number: int, *_: object) -> None:
        self._log.info("step %d has ended", number)
