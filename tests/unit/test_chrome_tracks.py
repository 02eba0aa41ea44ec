"""Where spans are drawn: inside their parents, apart from everything else, however they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from chrome_files import PID, context, events_of, names_by_track, slices, span
from hypothesis import given
from hypothesis import strategies as st
from trace_validator import inner_slices

from otel_torchprof._encode import chrome_tracks
from otel_torchprof._encode.chrome_spans import ChromeSpans
from otel_torchprof._encode.chrome_tracks import Lanes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


def on_thread(
    name: str, start: int, end: int, thread: Any = 7, thread_name: Any = "worker", **more: Any
) -> ReadableSpan:
    """A span of a thread; the first spans of the tests are at 1000, so that others can be around them."""
    attributes = {"thread.id": thread, "thread.name": thread_name} | more.pop("attributes", {})
    return span(name, start, end, attributes=attributes, **more)


def check_lanes(events: list[dict[str, Any]]) -> None:
    """On a track that is no thread's, what lies inside another slice is its child."""
    for outer, inner in inner_slices(events):
        assert inner["args"]["parent_id"] == outer["args"]["span_id"], (outer, inner)


def test_a_request_and_its_parts_share_a_lane():
    """Spans that nest are drawn nested, however deep; the next request takes the same lane."""
    request = [
        span("db", 12, 15, number=3, parent=2),
        span("handler", 11, 18, number=2, parent=1),
        span("GET", 10, 20, number=1),
    ]
    events = events_of(request, [span("next", 20, 30, number=4)])
    assert names_by_track(events) == {"spans 1": ["GET", "handler", "db", "next"]}


def test_what_overlaps_takes_another_lane():
    """Neither a request beside another, nor one that happens to lie inside it in time, is drawn as its part."""
    events = events_of([span("A", 0, 100, number=1), span("B", 50, 150, number=2), span("C", 60, 70, number=3)])
    assert names_by_track(events) == {"spans 1": ["A"], "spans 2": ["B"], "spans 3": ["C"]}


def test_parallel_children_do_not_look_like_each_others():
    """Of two children at the same time one is drawn in the parent, the other beside it, and so are its own children."""
    events = events_of(
        [
            span("parent", 0, 100, number=1),
            span("left", 10, 50, number=2, parent=1),
            span("right", 20, 40, number=3, parent=1),
            span("of right", 21, 30, number=4, parent=3),
            span("outlives", 90, 110, number=5, parent=1),
        ]
    )
    assert names_by_track(events) == {"spans 1": ["parent", "left"], "spans 2": ["right", "of right", "outlives"]}


def test_a_parent_that_comes_after_its_children_is_drawn_around_them():
    """Children end before their parents and often go out an export earlier."""
    events = events_of(
        [
            span("first", 10, 20, number=2, parent=1),
            span("other", 12, 14, number=9),
            span("deep", 30, 40, number=4, parent=3),
        ],
        [span("second", 25, 45, number=3, parent=1)],
        [span("parent", 0, 100, number=1)],
    )
    assert names_by_track(events) == {"spans 1": ["parent", "first", "second", "deep"], "spans 2": ["other"]}


def test_a_parent_that_begins_with_its_first_child_is_drawn_around_it():
    """In one export the longer one is written first; in a later one it goes beside, or viewers would misplace it."""
    child, parent = span("child", 10, 15, number=2, parent=1), span("parent", 10, 20, number=1)
    assert names_by_track(events_of([child, parent])) == {"spans 1": ["parent", "child"]}
    assert names_by_track(events_of([child], [parent])) == {"spans 1": ["child"], "spans 2": ["parent"]}


def test_a_call_to_oneself_is_drawn_inside_the_call():
    """A remote parent may be in this process; where it is not, requests of one caller have nothing to do with each other."""
    caller = context(1, is_remote=True)
    requests = [span("A", 1, 10, number=2, parent=caller), span("B", 5, 19, number=3, parent=caller)]
    assert names_by_track(events_of(requests, [])) == {"spans 1": ["A"], "spans 2": ["B"]}
    assert names_by_track(events_of([*requests, span("call", 0, 20)])) == {"spans 1": ["call", "A"], "spans 2": ["B"]}


@st.composite
def families(draw: Any) -> list[list[ReadableSpan]]:
    """Spans with any times and parents, in any order, over some exports."""
    count = draw(st.integers(1, 25))
    moments = st.integers(0, 40)
    spans = []
    for number in draw(st.permutations(range(1, count + 1))):
        start = draw(moments)
        spans.append(span(str(number), start, start + draw(moments), number=number, parent=draw(st.integers(0, count))))
    cut = draw(st.integers(1, count))
    return [spans[i : i + cut] for i in range(0, count, cut)]


@given(families())
def test_whatever_comes_is_inside_its_parent_or_apart(exports):
    """No order of export, no times and no parents make a slice cross another or lie in a stranger."""
    events = events_of(*exports)
    check_lanes(events)
    assert len(slices(events)) == sum(len(export) for export in exports)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60), st.integers(0, 30)), max_size=80))
def test_what_lanes_forget_is_left_alone(spans):
    """With room for few slices the lanes stay right, and nothing is put where they no longer know what is there."""
    lanes = Lanes(most_slices=8)
    placed: dict[int, list[tuple[int, int, int, int]]] = {}
    for number, (start, length, parent) in enumerate(spans, 1):
        lane = lanes.place(start, start + length, number, parent)
        assert len(lanes._lane_of) <= 8
        for other, begin, end, _ in placed.get(lane, []):
            apart = end <= start or start + max(length, 1) <= begin
            inside = begin <= start and start + length <= end and parent == other
            enclosing = start < begin and end <= start + length
            deeper = begin <= start and start + length <= end
            assert apart or inside or enclosing or deeper, (lane, spans[:number])
        placed.setdefault(lane, []).append((number, start, start + max(length, 1), parent))


def test_lanes_stay_few():
    """Requests one after another, eight at a time, need eight lanes for ever, and memory stays where it is."""
    lanes = Lanes(most_slices=100)
    used = {lanes.place(10 * (i // 8), 10 * (i // 8) + 9, i + 1, 0) for i in range(5000)}
    assert used == set(range(8))
    assert lanes._count <= 100


def test_a_thread_has_its_own_track():
    """Spans that say on which thread they ran are drawn there, named after it, in time as they nested."""
    spans = [
        on_thread("op", 1010, 1020, 7, "MainThread"),
        on_thread("step", 1000, 1100, 7, None),
        on_thread("other", 1015, 1050, 8, ""),
        span("request", 1005, 1200),
    ]
    events = events_of(spans)
    assert names_by_track(events) == {"spans 1": ["request"], "MainThread": ["step", "op"], "thread 8": ["other"]}
    assert {e["tid"] for e in slices(events)} == {7, 8, 1}


def test_thread_ids_that_viewers_cannot_take():
    """Addresses, as Python's thread ids are, would all be taken for the main thread; they get numbers of their own."""
    threads = [2**47 + 8, 2**47 + 2**32 + 8, -5, 0, 2**31 - 1, PID, 1]
    events = events_of([on_thread(str(i), 1000, 2000, thread, str(i)) for i, thread in enumerate(threads)])
    assert names_by_track(events) == {str(i): [str(i)] for i in range(len(threads))}
    tids = [event["tid"] for event in slices(events)]
    assert len(set(tids)) == len(threads)
    assert all(0 < tid < 2**31 for tid in tids)
    assert tids[4:6] == [2**31 - 1, PID]
    assert [event["args"]["attributes"]["thread.id"] for event in slices(events)] == threads


@pytest.mark.parametrize("odd", ["7", True, 2**63, None, 1.5, (7,)])
def test_thread_ids_that_are_none(odd):
    """What is no integer of 64 bits names no thread."""
    assert names_by_track(events_of([on_thread("x", 1, 2, odd)])) == {"spans 1": ["x"]}


def test_what_ended_on_another_thread_is_on_no_thread():
    """An asynchronous operator would lie across what its thread did in the meantime."""
    spans = [on_thread("future", 0, 30, attributes={"torch.async": True}), on_thread("op", 10, 40)]
    assert names_by_track(events_of(spans)) == {"spans 1": ["future"], "worker": ["op"]}


def test_labels_that_cross_on_a_thread():
    """Of two labels of interleaved tasks the one that began later leaves the thread's track, in one export or two."""
    first, op, second = on_thread("A", 0, 30), on_thread("op", 12, 14), on_thread("B", 10, 50, number=2)
    expected = {"spans 1": ["B"], "worker": ["A", "op"]}
    assert names_by_track(events_of([first, op, second])) == expected
    assert names_by_track(events_of([first, op], [second])) == expected
    assert names_by_track(events_of([op, second], [first])) == {"spans 1": ["A"], "worker": ["B", "op"]}


def test_what_was_open_at_an_export_is_drawn_around_what_went_out():
    """A label goes out after the operators in it, and is still drawn around them on the thread's track."""
    events = events_of(
        [on_thread("op1", 10, 20), on_thread("op2", 30, 40)],
        [on_thread("op3", 50, 60), on_thread("label", 25, 70)],
        [on_thread("epoch", 5, 80), on_thread("next", 80, 90)],
    )
    assert names_by_track(events) == {"worker": ["epoch", "op1", "label", "op2", "op3", "next"]}


@st.composite
def thread_lives(draw: Any) -> list[list[ReadableSpan]]:
    """Spans of two threads and of none, with any times, over some exports."""
    moments = st.integers(0, 60)
    spans = []
    for number in range(1, draw(st.integers(1, 30)) + 1):
        start = draw(moments)
        spans.append(
            on_thread(str(number), start, start + draw(moments), draw(st.sampled_from([7, 8, None])), number=number)
        )
    cut = draw(st.integers(1, len(spans)))
    return [spans[i : i + cut] for i in range(0, len(spans), cut)]


@given(thread_lives(), st.sampled_from([1, 3, 1024]))
def test_nothing_crosses_on_any_track(exports, most):
    """Spans of threads may overlap as they like: each track stays nested, also where little of it is remembered."""
    usual = chrome_tracks._ThreadTrack._MOST
    chrome_tracks._ThreadTrack._MOST = most
    try:
        assert len(slices(events_of(*exports))) == sum(len(export) for export in exports)
    finally:
        chrome_tracks._ThreadTrack._MOST = usual


def test_a_threads_past_takes_little_memory():
    """What is remembered of a thread does not grow, and a label around much of it still has its place there."""
    encoder = ChromeSpans(PID)
    for first in range(0, 200_000, 10_000):
        ops = [on_thread("op", start, start + 5) for start in range(first, first + 10_000, 10)]
        list(encoder.encode(ops, begin=first == 0))
    (track,) = encoder._tracks._threads.values()
    assert len(track._start) <= 1024
    events = events_of([on_thread("epoch", -5, 200_000), on_thread("next", 200_001, 200_002)], encoder=encoder)
    assert {event["tid"] for event in slices(events)} == {7}


def test_lanes_have_a_limit():
    """Of spans that all overlap, those that find no room share the last lane; one that has room elsewhere goes there."""
    lanes = Lanes(most_lanes=3)
    assert [lanes.place(0, 10 + span, span, 0) for span in range(1, 6)] == [0, 1, 2, 2, 2]
    assert lanes.place(11, 12, 9, 0) == 0


def test_an_interrupt_between_a_lane_and_its_track():
    """A lane that was opened when an interrupt came has its track with the next export, and so has the one after it."""
    spans = ChromeSpans(PID)
    spans._tracks._lanes.place(1000, 2000, 1, 0)
    events = events_of([span("a", 1500, 1800), span("b", 1600, 1900)], encoder=spans)
    check_lanes(events)
    assert {event["name"] for event in slices(events)} == {"a", "b"}
