"""The same random events twice: as torch's own objects and as a batch of this package."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from device_runs import cuda_pairs
from hypothesis import strategies as st

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import Flag
from otel_torchprof._model.tree import HIDDEN_NAMES, display_name

NAMES = (
    "aten::mm",
    "aten::add",
    "aten::a_rather_long_operator_name_that_has_to_be_cut_somewhere",
    "step",
    "ProfilerStep#1",
)
NAMES += ("ProfilerStep#2", "aten::is_leaf", "[memory]")
SHAPES: tuple[list[Any], ...] = ([], [[2, 3]], [[2, 3], []], [[[1], [4, 5]], [7]], [[]])


@dataclass
class Event:
    """What a recorder would note; times in us; ``shapes`` are structured."""

    id: int
    name: str
    thread: int
    start: int
    end: int = 0
    parent: int = -1
    scope: int = 0
    is_async: bool = False
    shapes: list[Any] = field(default_factory=list)


@st.composite
def forests(draw: Any, threads: int = 2, moves: int = 30) -> list[Event]:
    """Events of a few threads, grouped by thread in the order of their begins.

    Each thread opens and closes events over its own clock. Closing another one than the last opened makes it misnested; then
    the clock moves between begins, because who contains whom among misnested events of one start is anybody's guess.
    """
    events: list[Event] = []
    for thread in range(1, draw(st.integers(1, threads)) + 1):
        misnested = draw(st.booleans())
        clock, stack = draw(st.integers(0, 5)), list[int]()
        for move in draw(st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 16)), max_size=moves)):
            opening, number = move
            if opening:
                clock += max(number % 3, int(misnested))
                events.append(_opened(draw, len(events), thread, clock, stack))
                stack.append(len(events) - 1)
            elif stack:
                clock += 1 + number % 3
                events[stack.pop(number % len(stack) if misnested else -1)].end = clock
        while stack:
            clock += 1
            events[stack.pop()].end = clock
    return events


def _opened(draw: Any, row: int, thread: int, clock: int, stack: list[int]) -> Event:
    return Event(
        id=row + 1,
        name=draw(st.sampled_from(NAMES)),
        thread=thread,
        start=clock,
        parent=stack[-1] if stack else -1,
        scope=draw(st.sampled_from((0, 0, 0, 7))),
        is_async=draw(st.sampled_from((False,) * 6 + (True,))),
        shapes=draw(st.sampled_from(SHAPES)),
    )


def as_batch(events: list[Event], with_shapes: bool = True) -> Batch:
    """The events as columns; the trace begins at Unix time 0."""
    names = ["", *dict.fromkeys(event.name for event in events)]
    columns: dict[str, Any] = {
        "id": [event.id for event in events],
        "start": [event.start * 1000 for event in events],
        "end": [event.end * 1000 for event in events],
        "name": [names.index(event.name) for event in events],
        "parent": [event.parent for event in events],
        "thread": [event.thread for event in events],
        "scope": [event.scope for event in events],
        "flags": [Flag.ASYNC if event.is_async else 0 for event in events],
    }
    threads = [
        RecordedThread(1000 + i, 7000 + i, i) for i in range(max((event.thread for event in events), default=0) + 1)
    ]
    if not with_shapes:
        return Batch.of(columns, names, threads)
    words: list[int] = []
    columns["inputs"] = [_encoded(event.shapes, words) for event in events]
    return Batch.of(columns, names, threads, inputs=_int64(words))


@st.composite
def timed(draw: Any) -> Batch:
    """A random forest, some of whose events have pairs on two streams of two devices."""
    events = draw(forests())
    few = st.integers(0, 1)
    pairs = [(event.id, draw(few), draw(st.integers(0, 9)), draw(few)) for event in events if draw(st.booleans())]
    return replace(as_batch(events), devices=cuda_pairs(*pairs) if pairs else None)


def as_torch(events: list[Event], with_shapes: bool = True) -> Any:
    """The events as torch's list with torch's tree, the way torch's profiler makes it."""
    from torch.autograd.profiler_util import EventList, FunctionEvent

    made = [
        FunctionEvent(
            id=event.id,
            name=display_name(event.name),
            trace_name=event.name,
            overload_name="",
            thread=event.thread,
            start_us=event.start / 1,  # torch's are floats
            end_us=event.end / 1,
            fwd_thread=0,
            scope=event.scope,
            is_async=event.is_async,
            is_user_annotation=event.scope == 7,
            input_shapes=[_plain(shape) for shape in event.shapes] if with_shapes else [],
            structured_input_shapes=event.shapes if with_shapes else [],
            stack=[],
            concrete_inputs=[None for _ in event.shapes] if with_shapes else [],
            kwinputs={},
            flops=0,
        )
        for event in events
        if event.name not in HIDDEN_NAMES
    ]
    made.sort(key=lambda event: [event.time_range.start, -event.time_range.end])
    listed = EventList(made)
    listed._build_tree()
    return listed


def _plain(shape: list[Any]) -> list[int]:
    return [] if shape and isinstance(shape[0], list) else shape


def _encoded(shapes: list[Any], words: list[int]) -> int:
    """Appends the words of one event's inputs; no shapes means that nothing was recorded."""
    if not shapes:
        return -1
    at = len(words)
    words.append(len(shapes))
    for shape in shapes:
        if shape and isinstance(shape[0], list):
            words.append(2 | len(shape) << 32)
            for tensor in shape:
                words.extend((1 | 7 << 8 | len(tensor) << 32, *tensor))
        else:
            words.extend((1 | 7 << 8 | len(shape) << 32, *shape))
    return at


def _int64(words: list[int]) -> Any:
    import numpy as np

    return np.array(words, dtype=np.int64)
