"""Faults that one look at a stack tells: what a line of the program does in each step."""

from __future__ import annotations

import copy
import csv
import gc
import statistics
from typing import TYPE_CHECKING, Any

import torch
from faults import Fault
from torch import nn

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

_IN_LOOP = frozenset(("python-gap", "operator-bound"))
_NORM, _EPSILON = 1.0, 1e-6
_KEPT = 0.99


class ClippingInPython(Fault):
    """Gradients are measured and scaled in so many pieces, one after another."""

    right = _IN_LOOP | {"optimizer-bound"}
    lines = ("piece.norm().item()", "piece.mul_(")

    def reduce(self, model: nn.Module) -> None:
        self.clip_gradients([each.grad for each in model.parameters()])

    def clip_gradients(self, gradients: list[torch.Tensor]) -> None:
        pieces = [piece for each in gradients for piece in each.flatten().chunk(int(self.severity / len(gradients)))]
        total = 0.0
        for piece in pieces:
            total += piece.norm().item() ** 2
        scale = min(_NORM / (total**0.5 + _EPSILON), 1.0)
        for piece in pieces:
            piece.mul_(scale)


class ClampingInPython(ClippingInPython):
    """Each of so many pieces of gradients is clamped."""

    lines = ("piece.clamp_(",)

    def clip_gradients(self, gradients: list[torch.Tensor]) -> None:
        for each in gradients:
            for piece in each.flatten().chunk(int(self.severity / len(gradients))):
                piece.clamp_(-_NORM, _NORM)


class SortingScheduler(Fault):
    """A scheduler sorts so many losses in each step."""

    right = frozenset(("python-gap",))
    lines = ("sorted(self._losses",)

    def __enter__(self) -> Self:
        self._losses = [float(number * 7919 % 10_007) for number in range(int(self.severity))]
        return self

    def after(self, *_: object) -> None:
        self.step()

    def step(self) -> float:
        return sorted(self._losses, key=abs)[len(self._losses) // 2]


class MedianScheduler(SortingScheduler):
    """The same with a function of Python's library."""

    lines = ("statistics.median_grouped(self._losses",)

    def step(self) -> float:
        return statistics.median_grouped(self._losses)


class DeepCopies(Fault):
    """The model and so many objects of the program are copied deeply in each step."""

    right = _IN_LOOP | {"allocation-churn"}
    lines = ("copy.deepcopy((model, self._notes))",)

    def __enter__(self) -> Self:
        self._notes = [{"step": number, "loss": float(number)} for number in range(int(self.severity))]
        return self

    def after(self, _number: int, model: nn.Module, *_: torch.Tensor) -> None:
        self._best = copy.deepcopy((model, self._notes))


class AveragesInPython(Fault):
    """Averages of the model's weights are updated in so many pieces."""

    right = _IN_LOOP
    lines = ("kept.mul_(",)

    def after(self, _number: int, model: nn.Module, *_: torch.Tensor) -> None:
        self.update_ema([each.detach() for each in model.parameters()])

    def update_ema(self, weights: list[torch.Tensor]) -> None:
        count = int(self.severity / len(weights))
        pieces = [piece for each in weights for piece in each.flatten().chunk(count)]
        for piece in pieces:
            kept = torch.zeros(len(piece))
            kept.mul_(_KEPT).add_(piece, alpha=1 - _KEPT)


class Printing(Fault):
    """Each step prints so many lines."""

    right = frozenset(("python-gap",))
    lines = ("print(",)

    def __init__(self, severity: float, folder: Path) -> None:
        super().__init__(severity, folder)
        self._file = (folder / "printed.txt").open("w")

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def after(self, number: int, *_: Any) -> None:
        for line in range(int(self.severity)):
            print(f"step {number}, line {line}: {line / 7:.6f}", file=self._file, flush=True)


class WritingRows(Printing):
    """The same as a table of CSV."""

    lines = ("writer.writerow(", "self._file.flush()")

    def after(self, number: int, *_: Any) -> None:
        writer = csv.writer(self._file)
        for line in range(int(self.severity)):
            writer.writerow([number, line, line / 7])
            self._file.flush()


class SlowCollate(Fault):
    """The loop's own thread puts batches together from so many rows of numbers."""

    right = frozenset(("input-bound",))
    lines = ("torch.tensor([row])",)

    def collate(self, batch: Any) -> Any:
        rows = [[float(number), 1.0] for number in range(int(self.severity))]
        assert len(torch.cat([torch.tensor([row]) for row in rows]))
        return batch


class PaddingCollate(SlowCollate):
    """It pads so many lists of numbers in Python."""

    lines = ("row + [0] * ",)

    def collate(self, batch: Any) -> Any:
        rows = [[1] * (number % 50) for number in range(int(self.severity))]
        assert [row + [0] * (50 - len(row)) for row in rows]
        return batch


class FrequentCollections(Fault):
    """The garbage collector runs after every so many new objects, through many that are alive."""

    right = frozenset(("gc-bound",))
    also = frozenset(("python-gap",))  # to make the objects is the program's own time
    lines = ("[number]",)

    def __enter__(self) -> Self:
        gc.freeze()
        self._thresholds = gc.get_threshold()
        self._alive = [[number] for number in range(100_000)]
        gc.set_threshold(int(self.severity), 2, 2)
        return self

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._thresholds)
        self._alive.clear()
        gc.unfreeze()

    def after(self, *_: object) -> None:
        self._last = [[number] for number in range(20_000)]


class UnfusedOptimizer(Fault):
    """The optimizer updates so many small parameters one after another."""

    right = frozenset(("optimizer-bound",))
    lines = ("optimizer.step()",)
    kind: Any = torch.optim.AdamW

    def __enter__(self) -> Self:
        self._more = [nn.Parameter(torch.zeros(8)) for _ in range(int(self.severity))]
        return self

    def optimizer(self, _make: Any, parameters: Any) -> torch.optim.Optimizer:
        return self.kind([*parameters, *self._more], lr=1e-4, foreach=False)

    def reduce(self, _model: nn.Module) -> None:
        for each in self._more:
            each.grad = each.detach()


class UnfusedNadam(UnfusedOptimizer):
    """The same with another optimizer."""

    kind = torch.optim.NAdam


class Conversions(Fault):
    """Each step converts so many MB of numbers to another type, and back."""

    right = frozenset(("operator-bound", "allocation-churn"))
    lines = (".double()",)

    def __enter__(self) -> Self:
        self._table = torch.rand(int(self.severity * 250_000))
        return self

    def before(self, _number: int) -> None:
        self._table = self._table.double().float()


class Metrics(Fault):
    """Each step counts so many predictions in Python."""

    right = _IN_LOOP
    lines = ("hits += ",)

    def after(self, _number: int, *_: object) -> None:
        self.accuracy([number % 10 for number in range(int(self.severity))], [0] * int(self.severity))

    def accuracy(self, predictions: list[int], targets: list[int]) -> float:
        hits = 0
        for prediction, target in zip(predictions, targets, strict=True):
            hits += prediction == target
        return hits / len(targets)
