"""The spans of a recording without their attributes, as a profile makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_torchprof._model.live import placed_recording
from otel_torchprof._model.live_table import Flows, live_table
from otel_torchprof._model.step_spans import RecordedStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._model.span_table import SpanTable


def recorded_table(
    batch: Batch,
    *,
    start: int = 0,
    end: int = 1000,
    name: str = "torch.profile",
    steps: Sequence[RecordedStep] = (),
    **options: Any,
) -> SpanTable:
    """The table of a batch: of its steps, or of one recording from ``start`` to ``end``. ``options``: of ``placed_recording``."""
    known = steps or [RecordedStep(-1, start, end, name=name)]
    return live_table(*placed_recording(batch, known, **options), Flows())
