"""Names: a limit for each kind, and no work for those that a batch does not use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from forked import in_child
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from span_tables import span_rows

import otel_torchprof as otp
from otel_torchprof._columns.batch import Batch, KnownNames, Names
from otel_torchprof._columns.joined import joined
from otel_torchprof._encode import otlp, otlp_json
from otel_torchprof._encode.chrome_spans import Columns
from otel_torchprof._encode.spans import CheckedSpans, SpanList
from otel_torchprof._model.averages import Averages, RunningAverages
from otel_torchprof._model.inputs import InputKind, text_ids
from otel_torchprof._model.limits import span_sizes
from otel_torchprof._model.span_table import AttributeColumn, AttributeType, SpanTable, extend_names
from otel_torchprof._model.span_tables import joined_tables, narrowed, taken
from otel_torchprof._model.tree import torch_view
from otel_torchprof._native.ffi import ffi
from otel_torchprof._native.recorder import NAME_KINDS, Session, notes_on_names, recorder_stats

MOST_LABELS = 1 << 15
"""``kNameLimits`` in ``interner.h``."""


def label(name: str, args: str | None = None) -> None:
    with otp.record_function(name, args):
        pass


def texts_of(prof: otp.profile) -> list[str]:
    batch = prof._batch()
    return [batch.names[text] for text in text_ids(batch, InputKind.STRING).tolist() if text]


def of_recorder(names: Names) -> Names:
    """The same names as those that a recorder shares."""
    return Names(names.data, names.ends, known=KnownNames())


def address(names: Names) -> int:
    return names.data.ctypes.data


def test_labels_above_their_limit_share_a_name():
    """Labels with ids in their names become "(other labels)", are counted and said; code, texts and known labels keep theirs."""

    def body():
        before = recorder_stats().names_refused
        label("never recorded")
        with otp.profile(operators=False, record_shapes=True) as prof:
            label("known")
            for number in range(MOST_LABELS + 100):
                label(f"request {number}")
            label("known", "7")
            with pytest.raises(ZeroDivisionError), otp.record_function("known"):
                1 / 0  # noqa: B018 - the name of the error is new
        names = [prof.names[index] for index in prof.columns["name"].tolist()]
        errors = [prof.names[index] for index in prof.columns["error_type"].tolist()]
        notes = [note for note in prof.health.notes if "labels" in note]
        return before, names.count("(other labels)"), names[-3:], errors[-1], texts_of(prof)[-1], notes

    refused = 101  # of which one would fit if "known" were none
    assert eval(in_child(body)) == (  # noqa: S307 - what the child says of itself
        {},
        refused,
        ["(other labels)", "known", "known"],
        "ZeroDivisionError",
        "7",
        [f"{refused} labels are named '(other labels)': the process has more names of labels than are kept"],
    )


def test_texts_do_not_take_the_names_of_labels():
    """Arguments of labels, such as ids, have a limit of their own: a label that comes after them has its name."""

    def body():
        with otp.profile(operators=False, record_shapes=True) as prof:
            for number in range(MOST_LABELS + 1):
                label("request", str(number))
            label("afterwards")
        names = [prof.names[index] for index in prof.columns["name"].tolist()]
        return recorder_stats().names_refused, texts_of(prof)[-1], names[-1]

    assert eval(in_child(body)) == ({"texts": 1}, "(other texts)", "afterwards")  # noqa: S307


def test_a_profile_says_what_happened_in_it():
    """A profile does not speak of names that exceeded the limit before it began."""

    def body():
        with otp.profile(operators=False):
            for number in range(MOST_LABELS + 1):
                label(str(number))
        with otp.profile(operators=False) as prof:
            label("0")
        return len(notes_on_names()), [note for note in prof.health.notes if "labels" in note]

    assert in_child(body) == "(1, [])"


def test_kinds_are_those_of_the_recorder():
    """Python has the recorder's names for what exceeds, in its order."""
    with otp.profile(operators=False) as prof:
        label("one")
    assert prof.names[1 : 1 + len(NAME_KINDS)] == [f"(other {kind})" for kind in NAME_KINDS]


def test_drains_copy_no_names():
    """Each batch sees the recorder's own memory, also after thousands of names more; an older batch sees its own names in it."""
    session = Session(1 << 20)
    session.start()
    label("first")
    first = session.drain()
    for number in range(5000):
        label(f"made up {number}")
    second = session.drain()
    session.stop()
    assert address(first.names) == address(second.names)
    assert len(second.names) >= len(first.names) + 5000
    assert first.names[first["name"][0]] == second.names[first["name"][0]] == "first"
    assert joined([first, second]).names is second.names


def test_each_name_is_looked_at_once():
    """What is to be known of names is found out when they are new; a drain of names that are known looks at none."""
    known = KnownNames()
    names = [f"name {number}" for number in range(1000)]
    looked_at = []
    for count in (500, 500, 1000, 1000):
        table = Names.of(["", *names[:count]])
        batch = replace(
            Batch.of({"start": [0], "end": [1], "name": [3]}, [""]), names=Names(table.data, table.ends, known=known)
        )
        torch_view(batch)
        looked_at.append(known.looked_at)
    per_name = looked_at[0] / 501
    assert per_name == round(per_name)
    assert looked_at == [501 * per_name, 501 * per_name, 1001 * per_name, 1001 * per_name]


def test_matches_of_a_table_that_grows():
    """Whole names and beginnings, in names that come later too; what lies across two names is none."""
    known, words = KnownNames(), ["", "step#", "a", "step#1", "my step#2", "stop", "st", "ep#3", "step#4"]
    for count in range(1, len(words) + 1):
        table = Names.of(words[:count])
        found = Names(table.data, table.ends, known=known).matching(("stop",), ("step#",))
        expected = [word == "stop" or word.startswith("step#") for word in words[:count]]
        assert (found is None) == (not any(expected))
        assert found is None or found.tolist() == expected


def test_matches_among_added_names():
    """Names that are added to others are looked at too."""
    names = of_recorder(Names.of(["", "a"])).followed_by(Names.of(["b"])).followed_by(Names.of(["a"]))
    assert list(names) == ["", "a", "b", "a"]
    assert names.matching(("a",)).tolist() == [False, True, False, True]
    assert names.matching(("b",)).tolist() == [False, False, True, False]
    assert names.matching(("c",)) is None
    assert names.matching((), parts=("b",)).tolist() == [False, False, True, False]


def table_with_many_names() -> SpanTable:
    """Three spans that use few of very many names, some of which are added."""
    many = of_recorder(Names.of(["", *(f"unused {number}" for number in range(10_000)), "ä span", b"bad \xff"]))
    names = extend_names(extend_names(many, ["added"]), ["more", "text"])
    table = span_rows(["a", "b", "c"], name=np.array([10_001, 10_003, 10_004], dtype=np.uint32))
    values = np.array([10_002, 10_005], dtype=np.uint32)
    text = AttributeColumn("text", AttributeType.NAME, values, np.array([0, 1]))
    return replace(table, names=names, attributes=(text,), trace_states=("k=v",))


def test_tables_add_names_without_a_copy():
    """A table with names of its own, and what is lent to the encoders of it, point to the recorder's memory."""
    table = table_with_many_names()
    recorders = table.names.data
    assert extend_names(table.names, ["one more"]).data is recorders
    assert table.names.nbytes < 100
    views = CheckedSpans(table, range(3))
    assert int(ffi.cast("uintptr_t", views.spans.native.names.data)) == recorders.ctypes.data
    assert views.spans.native.names.count == 10_003


@pytest.mark.parametrize("encode", [otlp.encode_counted, otlp_json.encode_counted])
def test_added_names_encode_as_any_others(encode):
    """Requests are those of the same table with all of its names in one piece, or with only those that it uses."""
    table = table_with_many_names()
    flat = replace(table, names=table.names.flat())
    enclosing = {"resource": Resource({}), "scope": InstrumentationScope("scope")}
    expected = [bytes(message) for message, _ in encode(flat, **enclosing)]
    for same in (table, narrowed(table)):
        assert [bytes(message) for message, _ in encode(same, **enclosing)] == expected


def test_chrome_traces_of_spans_escape_what_they_use():
    """A trace of spans is the same with all names in one piece, and holds no more names than its spans have."""
    table = table_with_many_names()
    written = []
    for each in (table, replace(table, names=table.names.flat())):
        columns = Columns(SpanList(each, resource=Resource({}), scope=InstrumentationScope("scope")))
        columns.lay_out(np.arange(3), np.zeros(3, dtype=np.int64))
        written.append(b"".join(columns.pieces(1, 0, 0)))
        assert len(columns.checked.all_names) < 10
    assert written[0] == written[1]
    assert b"bad" in written[0]


def test_narrowed_taken_and_joined_tables():
    """Tables with few of many names have the same spans, sizes and texts as the table that they are of."""
    table = table_with_many_names()
    for found in (narrowed(table), taken(table, np.arange(3)), joined_tables([table, taken(table, np.arange(0))])):
        assert len(found.names) < 10
        assert [found.names[index] for index in found.name] == ["ä span", "added", "more"]
        assert [found.names[index] for index in found.attributes[0].values] == ["bad �", "text"]
        assert span_sizes(found).tolist() == span_sizes(table).tolist()


def test_averages_do_not_grow_with_names():
    """Averages of a few events are of their names, however many the process has, and sum to what few names give."""
    names = ["", *(f"name {number}" for number in range(50_000))]
    columns = {"start": [0, 1, 20], "end": [10, 4, 25], "parent": [-1, 0, -1], "scope": [0, 0, 7]}
    few = Batch.of({**columns, "name": [1, 2, 1]}, ["", "name 49999", "name 7"])
    many = Batch.of({**columns, "name": [50_000, 8, 50_000]}, names)
    found = [Averages.of(torch_view(batch)) for batch in (few, many)]
    assert found[0].first.tolist() == found[1].first.tolist() == [0, 1, 2]
    assert found[0].self_cpu_time_total.tolist() == found[1].self_cpu_time_total.tolist()
    running = [RunningAverages(), RunningAverages()]
    for sums, batch in zip(running, (few, many), strict=True):
        sums.add(batch)
    assert running[0].read() == running[1].read()
    assert len(running[1]._groups) == len(running[0]._groups)


def test_numbered_steps_share_an_entry_of_the_averages():
    """Numbered steps of the profiler, a name each, are one entry of the averages over a process, as in a profile's."""
    running, names = RunningAverages(), ["", "ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]
    for step in (1, 2, 3):
        running.add(Batch.of({"name": [step], "start": [0], "end": [5], "scope": [7]}, names))
    assert [(entry.name, entry.calls) for entry in running.read()] == [("ProfilerStep*", 3)]
