"""The health of an instrumentation, with that of what runs beside it: metrics of GPUs, the black box."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from otel_torchprof._metrics.gpu_pass import NOT_OPENED
from otel_torchprof.health import ON

if TYPE_CHECKING:
    from otel_torchprof._blackbox.box import BlackBox
    from otel_torchprof._metrics.gpu_polling import GpuMetrics
    from otel_torchprof.health import ProcessorHealth


def combined(health: ProcessorHealth, gpus: GpuMetrics | None, box: BlackBox | None) -> ProcessorHealth:
    """With the state of the GPU metrics, once somebody has read them: ``gpus`` in a word, and a note where a GPU lacks one.

    And that of the black box.
    """
    if gpus is not None and (state := gpus.health).sources["nvml"] != NOT_OPENED:
        lacking = {name: why for name, why in state.sources.items() if why != ON and name != "nvml"}
        notes = () if state.sources["nvml"] != ON else tuple(f"{name} {why}" for name, why in lacking.items())
        sources = {**health.sources, "gpus": state.sources["nvml"]}
        health = replace(health, sources=sources, notes=(*health.notes, *notes, *state.notes))
    return health if box is None else replace(health, sources={**health.sources, "black box": box.state})
