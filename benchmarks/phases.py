"""Whether phases of whole training programs are what the programs have timed themselves, around the same calls.

The programs are those of the tests, in sizes whose steps take some 20 ms and more: by how much the program's own time of a
call differs from the phase, and what of its steps is in no phase.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from harness import OURS, Budget, Row, Settings
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ITERATIONS = 24
_WARM_UP = 4
_LEAST_US, _PERCENT = 20.0, 2.0
_UNATTRIBUTED_PERCENT = 5.0


def measure(settings: Settings) -> list[Row]:
    """For each program: iterations, phases, and what is in none."""
    iterations = settings.rounds_or(_ITERATIONS) + _WARM_UP
    return [
        row for what, program, sizes in _programs() for row in _rows(what, program, {"iterations": iterations, **sizes})
    ]


def _programs() -> Iterator[tuple[str, Callable[..., None], dict[str, int]]]:
    # What they count and time themselves is shown in the tests.
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "torch"))
    import hard_programs
    import library_programs
    import step_programs

    large, small = {"width": 512, "batch": 256}, {"width": 512, "batch": 64}
    yield "Hugging Face Trainer", library_programs.trainer, {"width": 128, "batch": 32}
    yield "Lightning", library_programs.lightning, large
    yield "GAN", step_programs.gan, large
    yield "WGAN", step_programs.wgan, small
    yield "mixed precision", step_programs.skipped_steps, large
    yield "LBFGS", step_programs.closures, small
    yield "optimizer in backward", step_programs.in_backward, large
    yield "two optimizers", step_programs.two_optimizers, large
    yield "manual update", step_programs.by_hand, large
    yield "diffusion, averaged model", step_programs.diffusion, large
    yield "checkpointing", hard_programs.checkpointing, large
    yield "plain loop", step_programs.plain, large
    yield "compiled", step_programs.compiled, large


def _rows(what: str, program: Callable[..., None], sizes: dict[str, int]) -> Iterator[Row]:
    from own_counts import UNATTRIBUTED, segments

    own, spans = _recorded(program, sizes)
    steps = [segment for segment in segments(spans, own.thread) if segment.kind == "training"]
    yield Row(f"{what}, iterations less steps", OURS, [own.iterations - len(steps)], "", Budget())
    pieces = [piece for piece in own.expected() if piece.kind == "training"]
    if len(pieces) != len(steps):
        return
    differences, times = defaultdict(list), defaultdict(list)
    shares = []
    for piece, step in list(zip(pieces, steps, strict=True))[_WARM_UP:-1]:
        found = step.times()
        shares.append(100 * found[UNATTRIBUTED] / sum(found.values()))
        for name, count in piece.counts.items():
            if count:
                differences[name].append(abs(piece.times[name] - found.get(name, 0)) / count / 1e3)
                times[name].append(piece.times[name] / count / 1e3)
    length = statistics.median(sum(step.times().values()) for step in steps) / 1e6
    for name, values in differences.items():
        limit = max(_LEAST_US, statistics.median(times[name]) * _PERCENT / 100)
        yield Row(f"{what}, own time of a call beside its phase", name, values, "us", Budget(plus=limit))
    yield Row(f"{what}, in no phase of steps of {length:.0f} ms", OURS, shares, "%", Budget(plus=_UNATTRIBUTED_PERCENT))


def _recorded(program: Callable[..., None], sizes: dict[str, int]) -> tuple[Any, list[Any]]:
    from own_counts import Own
    from step_programs import Sizes

    torch.manual_seed(0)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    exporter, own = InMemorySpanExporter(), Own()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(otp.TorchSpanProcessor(exporter))
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="steps")
    try:
        with tempfile.TemporaryDirectory() as folder:
            program(own, Sizes(Path(folder), **sizes))
    finally:
        otp.TorchInstrumentor().uninstrument()
        provider.shutdown()
    return own, list(exporter.get_finished_spans())
