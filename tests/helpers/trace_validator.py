"""Checks what must hold for every Chrome trace: ``validate(bytes)`` returns the parsed trace."""

from __future__ import annotations

import json
from collections import defaultdict
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUIRED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "b": {"name", "cat", "pid", "tid", "ts", "id2", "args"},
    "e": {"name", "cat", "pid", "tid", "ts", "id2"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "M": {"name", "pid", "tid", "args"},
    "P": {"name", "cat", "pid", "tid", "ts", "id", "args"},
}
"""The keys of each phase ("ph"), neither more nor fewer."""


OF_THE_WINDOW = {
    "Spans": ("PyTorch Profiler (0)", "X", {"name", "cat", "pid", "tid", "ts", "dur", "args"}),
    "Traces": ("Iteration Start: PyTorch Profiler", "i", {"name", "pid", "tid", "ts", "s"}),
    "": ("Record Window End", "i", {"name", "pid", "tid", "ts", "s"}),
}
"""Name, phase and keys of Kineto's events of a recording as a whole, by what they have for a process."""


def validate(trace: bytes) -> dict[str, Any]:
    """Raises AssertionError for the first rule that the trace breaks. Times are Decimals in microseconds."""
    parsed = parse(trace)
    events = [event for event in parsed["traceEvents"] if event["pid"] not in OF_THE_WINDOW]
    check_window([event for event in parsed["traceEvents"] if event["pid"] in OF_THE_WINDOW])
    for event in events:
        check_fields(event)
    check_metadata(events)
    check_nesting(events)
    check_flows(events)
    check_async_pairs(events)
    check_counters(events)
    check_devices(events)
    check_samples([event for event in events if event["ph"] == "P"])
    assert parsed["schemaVersion"] == 1
    assert parsed["displayTimeUnit"] == "ms"
    assert isinstance(parsed["baseTimeNanoseconds"], int)
    return parsed


def parse(trace: bytes) -> dict[str, Any]:
    """Strict JSON: valid UTF-8, no key twice, no NaN, decimals kept exactly."""
    return json.loads(
        trace.decode("utf-8", "strict"),
        parse_float=Decimal,
        parse_constant=refuse,
        object_pairs_hook=without_duplicates,
    )


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    assert len(set(keys)) == len(keys), f"a key stands twice in {keys}"
    return dict(pairs)


def check_fields(event: dict[str, Any]) -> None:
    assert event["ph"] in REQUIRED, event
    assert event.keys() - {"ph"} == REQUIRED[event["ph"]], event
    assert isinstance(event["name"], str), event
    assert isinstance(event["tid"], int), event
    for key in {"ts", "dur"} & event.keys() if event["ph"] != "P" else ():
        assert isinstance(event[key], Decimal), event
        assert event[key].as_tuple().exponent == -3, f"nanoseconds are three decimals: {event}"
    assert event.get("dur", 0) >= 0, event
    assert event.get("s", "p") in {"p", "t", "g"}, event


def check_window(events: list[dict[str, Any]]) -> None:
    """All three are there, or none."""
    if not events:
        return
    assert [(e["pid"], (e["name"], e["ph"], e.keys() - {"ph"})) for e in events] == list(OF_THE_WINDOW.items())
    whole, begin, end = events
    assert (begin["ts"], end["ts"]) == (whole["ts"], whole["ts"] + whole["dur"])


def check_metadata(events: list[dict[str, Any]]) -> None:
    """Each track has one name and one place; its process has a name."""
    reported = [(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"]
    assert len(set(reported)) == len(reported), "metadata stands twice"
    for pid, tid in {(e["pid"], e["tid"]) for e in events if e["ph"] not in "MC"}:
        assert ("thread_name", pid, tid) in reported, f"no thread_name for tid {tid}"
        assert ("thread_sort_index", pid, tid) in reported, f"no thread_sort_index for tid {tid}"
        assert ("process_name", pid, 0) in reported, f"no process_name for pid {pid}"


def slices_by_track(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Complete events by (pid, tid), as they began; of equal times the first written is the outer one."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return {key: sorted(track, key=lambda event: event["ts"]) for key, track in tracks.items()}


def inner_slices(events: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each slice that begins in another one of its track, behind the innermost of these."""
    for track in slices_by_track(events).values():
        enclosing: list[dict[str, Any]] = []
        for event in track:
            while enclosing and enclosing[-1]["ts"] + enclosing[-1]["dur"] <= event["ts"]:
                enclosing.pop()
            if enclosing:
                yield enclosing[-1], event
            enclosing.append(event)


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Two slices of a track lie apart or one inside the other."""
    for outer, inner in inner_slices(events):
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"], (outer, inner)


def check_flows(events: list[dict[str, Any]]) -> None:
    """An arrow has one start and one finish, not backwards in time, each where a slice of its track begins."""
    begins = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    ends: dict[Any, dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]], f"two ends alike: {event}"
            assert (event["pid"], event["tid"], event["ts"]) in begins, f"no slice for {event}"
            ends[event["id"]][event["ph"]] = event
    for arrow in ends.values():
        assert arrow.keys() == {"s", "f"}, f"half an arrow: {arrow}"
        assert arrow["s"]["ts"] <= arrow["f"]["ts"], arrow
        assert (arrow["s"]["cat"], arrow["s"]["name"]) == (arrow["f"]["cat"], arrow["f"]["name"]), arrow
        assert arrow["f"]["bp"] == "e", arrow


def check_async_pairs(events: list[dict[str, Any]]) -> None:
    """An async event has one begin and one end, with the same title, not backwards in time."""
    pairs: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            pairs[event["pid"], event["cat"], event["id2"]["local"]].append(event)
    for pair in pairs.values():
        assert [event["ph"] for event in pair] == ["b", "e"], pair
        assert pair[0]["name"] == pair[1]["name"], pair
        assert pair[0]["ts"] <= pair[1]["ts"], pair


def check_counters(events: list[dict[str, Any]]) -> None:
    """A counter has one series, of bytes or watts, on a track of its process, and does not go back in time."""
    latest: dict[Any, Decimal] = {}
    for event in events:
        if event["ph"] == "C":
            assert event["tid"] == 0, event
            ((unit, value),) = event["args"].items()
            assert isinstance(value, {"bytes": int, "W": Decimal}[unit]), event
            assert value >= 0, event
            assert latest.get((event["pid"], event["name"]), event["ts"]) <= event["ts"], event
            latest[event["pid"], event["name"]] = event["ts"]


DEVICE_CATEGORY = "gpu_user_annotation"


def check_devices(events: list[dict[str, Any]]) -> None:
    """What a device did lies on a track of a process that is a device, not before its event, and its arrow comes from there."""
    begun = {e["args"].get("External id"): e for e in events if e["ph"] in "Xb" and e["cat"] != DEVICE_CATEGORY}
    slices = [e for e in events if e["ph"] == "X" and e["cat"] == DEVICE_CATEGORY]
    labels = {e["pid"]: e["args"]["labels"] for e in events if e["ph"] == "M" and e["name"] == "process_labels"}
    known = [e["args"]["External id"] for e in slices]
    assert len(set(known)) == len(known), "an event has two slices on devices"
    for event in slices:
        assert event["args"].keys() == {"External id", "device", "stream id"}, event
        assert labels[event["pid"]].endswith(f" {event['args']['device']}"), event
        launch = begun.get(event["args"]["External id"])
        if launch is not None:
            assert event["pid"] != launch["pid"], event
            assert launch["name"].startswith(event["name"]), (launch, event)  # an overload may follow
            assert launch["ts"] <= event["ts"], (launch, event)
    check_device_arrows(events, slices, begun)


def check_device_arrows(
    events: list[dict[str, Any]], slices: list[dict[str, Any]], begun: dict[Any, dict[str, Any]]
) -> None:
    """Each slice of a device whose event is a slice has one arrow, from the begin of the one to the begin of the other."""
    ends = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf" and event["cat"] == "ac2g":
            ends[event["id"]][event["ph"]] = (event["pid"], event["tid"], event["ts"])
    arrows = sorted((arrow["s"], arrow["f"]) for arrow in ends.values())
    pairs = [(begun.get(e["args"]["External id"]), e) for e in slices]
    expected = [(launch, e) for launch, e in pairs if launch is not None and launch["ph"] == "X"]
    places = [tuple((e["pid"], e["tid"], e["ts"]) for e in pair) for pair in expected]
    assert arrows == sorted(places)


def check_samples(events: list[dict[str, Any]]) -> None:
    """Each profile of samples has one chunk, whose times, in whole us, go forwards, and whose calls are known before they are used."""
    begins, chunks = events[::2], events[1::2]
    assert len({event["id"] for event in begins}) == len(begins) == len(chunks), "half a profile, or two of one id"
    for begin, chunk in zip(begins, chunks, strict=True):
        data = chunk["args"]["data"]
        assert begin == {**chunk, "name": "Profile", "args": {"data": {"startTime": chunk["ts"]}}}, begin
        assert chunk["name"] == "ProfileChunk", chunk
        nodes = data["cpuProfile"]["nodes"]
        assert [node["id"] for node in nodes] == list(range(1, len(nodes) + 1)), nodes
        assert all(node.get("parent", 0) < node["id"] for node in nodes), nodes
        leaves = data["cpuProfile"]["samples"]
        assert len(leaves) == len(data["timeDeltas"]) == len(data["durations"]) > 0, data
        assert all(1 <= leaf <= len(nodes) for leaf in leaves), leaves
        assert all(isinstance(n, int) and n >= 0 for n in (chunk["ts"], *data["timeDeltas"], *data["durations"])), data
