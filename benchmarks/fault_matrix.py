"""Which fault is injected into the training of which model, in which sizes and severities.

Rules are made with programs of the develop half and tried with those of the unseen half, which have other models, other
sizes, other severities, other seeds, and other ways to be faulty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import fault_lines
import fault_models as models
import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CONTROL = "no fault"
HALVES = ("develop", "unseen")
_SEEDS = {"develop": 0, "unseen": 30_000}


class Program(NamedTuple):
    """A row of the matrix."""

    half: str
    fault: str
    kind: type[faults.Fault]
    make: Callable[[int], models.Task]
    sizes: tuple[int, ...]
    severities: tuple[float, ...] = (0.0,)

    @property
    def name(self) -> str:
        ranks = f" on {self.kind.ranks} ranks" if self.kind.ranks > 1 else ""
        return f"{self.fault}/{self.make.__name__}{ranks}".replace(" ", "-")

    def parameters(self, run: int) -> tuple[int, float, int]:
        """Size, severity and seed of a run: runs go through all pairs."""
        size = self.sizes[run % len(self.sizes)]
        severity = self.severities[run // len(self.sizes) % len(self.severities)]
        return size, severity, _SEEDS[self.half] + run


def matrix(half: str) -> list[Program]:
    """All programs of a half."""
    rows = _develop() if half == "develop" else _unseen()
    return [Program(half, *row) for row in rows]


def _develop() -> Iterator[tuple]:
    mlp, convolutions = (models.mlp, (384, 512)), (models.convolutions, (16, 24))
    transformer, lstm = (models.transformer, (64, 128)), (models.lstm, (96, 128))
    yield from _each("slow loader", faults.SlowLoader, (0.010, 0.030), mlp, convolutions)
    yield from _each("starved loader workers", faults.StarvedWorkers, (0.060, 0.100), mlp, lstm)
    yield from _each("starved loader workers", faults.BusyWorkers, (0.080, 0.120), (models.transformer, (64, 96)))
    yield from _each("GIL hog", faults.GilHog, (0.006, 0.012), mlp, transformer)
    yield from _each("garbage collection storm", faults.CollectionStorm, (60_000, 120_000), mlp, transformer)
    yield from _each("busy neighbour", faults.BusyNeighbour, (1, 2), mlp, convolutions)
    yield from _each("slow operator", faults.SlowOperator, (100_000, 200_000), mlp, convolutions)
    yield from _each("recompilation", faults.Recompilation, (1, 2), mlp, convolutions)
    yield from _each("checkpoints", faults.Checkpoints, (160, 240), mlp, lstm)
    yield from _each("evaluations", faults.Evaluations, (80, 120), mlp, transformer)
    yield from _each("late rank", faults.LateRank, (0.020, 0.040), (models.mlp, (128, 192)), (models.lstm, (32, 48)))
    yield from _each("allocation churn", faults.AllocationChurn, (32, 64), mlp, lstm)
    yield from _each("item in the loop", faults.ItemOfElements, (1200, 2000), mlp, lstm)
    yield from _each("blocking log", faults.BlockingLog, (8, 16), mlp, convolutions)
    yield from _each("clipping in Python", fault_lines.ClippingInPython, (600, 900), mlp, lstm)
    yield from _each("sorting scheduler", fault_lines.SortingScheduler, (40_000, 60_000), mlp, convolutions)
    yield from _each("deep copies", fault_lines.DeepCopies, (2000, 3000), mlp, lstm)
    yield from _each("printing", fault_lines.Printing, (3000, 5000), mlp, convolutions)
    yield from _each("collating in the loop", fault_lines.SlowCollate, (1500, 2500), mlp, lstm)
    yield from _each("frequent collections", fault_lines.FrequentCollections, (1000, 2000), mlp, lstm)
    yield from _each("unfused optimizer", fault_lines.UnfusedOptimizer, (60, 90), mlp, convolutions)
    yield from _each("conversions", fault_lines.Conversions, (12, 16), mlp, lstm)
    yield from _each("metrics in Python", fault_lines.Metrics, (150_000, 250_000), mlp, convolutions)
    yield from _controls(
        mlp,
        convolutions,
        transformer,
        lstm,
        (models.embedding, (64, 96)),
        (models.wide_layer, (1024, 1536)),
        (models.autoencoder, (256, 384)),
        (models.accumulating_mlp, (256, 384)),
        (models.bfloat16_mlp, (512, 768)),
    )
    yield from _each(CONTROL, faults.TwoRanks, (0.0,), mlp)


def _unseen() -> Iterator[tuple]:
    residual, sequence = (models.residual_mlp, (320, 448)), (models.sequence_convolutions, (36, 52))
    decoder, gru = (models.decoder, (96, 128)), (models.gru, (80, 112))
    towers, images = (models.two_towers, (64, 96)), (models.image_autoencoder, (16, 24))
    yield from _each("slow loader", faults.CompressedLoader, (24, 36), sequence, images)
    yield from _each("starved loader workers", faults.SortingWorkers, (900_000, 1_300_000), residual, gru)
    yield from _each("GIL hog", faults.JsonHog, (1000, 1400), sequence, towers)
    yield from _each("garbage collection storm", faults.CollectionInForward, (30_000, 60_000), residual, decoder)
    yield from _each("busy neighbour", faults.SortingNeighbour, (2, 2.5), gru, images)
    yield from _each("slow operator", faults.SlowDecomposition, (240, 300), gru, towers)
    yield from _each("recompilation", faults.DynamoRecompilation, (2, 4), towers, images)
    yield from _each("checkpoints", faults.SplitCheckpoints, (200, 260), residual, gru)
    yield from _each("evaluations", faults.MeasuringEvaluations, (70, 100), decoder, sequence)
    yield from _each(
        "late rank", faults.LateLoader, (0.035, 0.045), (models.two_towers, (56, 72)), (models.decoder, (40, 56))
    )
    yield from _each("allocation churn", faults.ChurnInForward, (56, 80), gru, images)
    yield from _each("item in the loop", faults.ItemOfNorms, (1200, 1800), sequence, gru)
    yield from _each("blocking log", faults.SlowHandler, (0.012, 0.020), residual, towers)
    yield from _each("clipping in Python", fault_lines.ClampingInPython, (2000, 3000), residual, gru)
    yield from _each("sorting scheduler", fault_lines.MedianScheduler, (60_000, 90_000), sequence, towers)
    yield from _each("deep copies", fault_lines.AveragesInPython, (1500, 2500), residual, gru)
    yield from _each("printing", fault_lines.WritingRows, (3000, 5000), sequence, towers)
    yield from _each("collating in the loop", fault_lines.PaddingCollate, (30_000, 50_000), residual, gru)
    yield from _each("frequent collections", fault_lines.FrequentCollections, (700, 1400), residual, towers)
    yield from _each("unfused optimizer", fault_lines.UnfusedNadam, (50, 80), sequence, gru)
    yield from _each("conversions", fault_lines.Conversions, (14, 20), residual, gru)
    yield from _each("metrics in Python", fault_lines.Metrics, (200_000, 300_000), sequence, towers)
    yield from _controls(
        residual,
        sequence,
        decoder,
        gru,
        towers,
        (models.wide_classifier, (1280, 2560)),
        images,
        (models.accumulating_decoder, (72, 104)),
        (models.bfloat16_residual_mlp, (336, 464)),
    )
    yield from _each(CONTROL, faults.TwoRanks, (0.0,), residual)


def _each(fault: str, kind: type[faults.Fault], severities: tuple[float, ...], *sized: tuple) -> Iterator[tuple]:
    for make, sizes in sized:
        yield fault, kind, make, sizes, severities


def _controls(*sized: tuple) -> Iterable[tuple]:
    return _each(CONTROL, faults.Fault, (0.0,), *sized)
