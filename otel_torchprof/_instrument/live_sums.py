"""What one drain adds to sums: of the averages by name, and of the time of children of the application's spans."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.phases import PHASE_PREFIX, UNATTRIBUTED
from otel_torchprof._process.give_way import give_way
from otel_torchprof._tree.displayed_devices import DisplayedTimes, displayed_times
from otel_torchprof._tree.tree import torch_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_torchprof._averages.running import RunningAverages
    from otel_torchprof._spans.placed import Placed
    from otel_torchprof._spans.step_spans import StepSpan
    from otel_torchprof._tree.tree import TreeView


def add_up(averages: RunningAverages, placed: Placed, ended: Sequence[StepSpan]) -> None:
    """Adds the events of a drain, and the steps that ended in it."""
    averages.add(*_displayed(placed))
    for step in ended:
        give_way()
        # Once each: not what else of it happened in other spans, nor what the end of the recording left of the last one.
        if step.trace.recorded and step.thread is not None:
            duration = step.end - step.start
            own = max(duration - step.child_time, 0)
            if step.phases is not None:  # the row of what is in no phase has it
                rest = step.phases.on_thread(step.thread, duration)[UNATTRIBUTED]
                averages.add_span(f"{PHASE_PREFIX}{UNATTRIBUTED}", rest, min(own, rest))
                own = 0
            averages.add_span(step.name, duration, own)


def child_times(placed: Placed, ended: Sequence[StepSpan]) -> dict[int, int]:
    """Time that the spans of this process did not spend themselves, by span id."""
    child_time: dict[int, int] = {}
    below = np.flatnonzero(placed.is_root)
    sums = np.zeros(len(placed.trace_groups), dtype=np.int64)
    np.add.at(sums, placed.trace_group[below], (placed.batch["end"] - placed.batch["start"])[below])
    for trace_group, time in zip(placed.trace_groups, sums.tolist(), strict=True):
        if trace_group.step is None and trace_group.parent_span_id and not trace_group.is_remote:
            child_time[trace_group.parent_span_id] = child_time.get(trace_group.parent_span_id, 0) + time
    for step in ended:
        if step.parent is not None and not step.parent.is_remote:
            child_time[step.parent.span_id] = child_time.get(step.parent.span_id, 0) + step.end - step.start
    return child_time


def _displayed(placed: Placed) -> tuple[TreeView, DisplayedTimes | None]:
    """The events as torch would list them, with the times of children of earlier drains, without what no sampler chose."""
    view = torch_view(placed.batch, modules=True)
    devices = None if placed.devices is None else displayed_times(view, placed.devices)
    if placed.child_time is not None:
        view = view.without_child_time(placed.child_time)
    recorded = np.array([trace_group.trace.recorded for trace_group in placed.trace_groups], dtype=np.bool_)
    if recorded.all():
        return view, devices
    requested = recorded[placed.trace_group[view.rows]]
    # For sums only: the parents of what remains would have to be renumbered for anything else.
    chosen = replace(
        view,
        rows=view.rows[requested],
        duration=view.duration[requested],
        self_time=view.self_time[requested],
        parent=view.parent[:0],
    )
    return chosen, None if devices is None else DisplayedTimes(*(column[requested] for column in devices))
