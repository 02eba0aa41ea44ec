"""Steps without their details."""

from __future__ import annotations

import json

from trace_group_tables import (
    TARGET,
    attribute,
    attributes_of,
    displayed,
    trace_group,
    trace_group_of,
    with_collectives,
)

from otel_torchprof._export.root_only import root_only
from otel_torchprof._model.span_table import AttributeType


def averages(table):
    """What the root says of its operators."""
    return [tuple(entry.values()) for entry in json.loads(attributes_of(table, 0)["torch.averages"])]


def test_only_the_root_is_left():
    """It says how many spans there were and which names took the most time of their own, without what they called."""
    table = trace_group(("torch.step", 0, 100, ("a", 0, 50, ("b", 0, 20), ("b", 20, 25)), ("c", 60, 90)))
    found = root_only(table, TARGET)
    [(name, start, end, parent, said)] = displayed(found)
    assert (name, start, end, parent, said["torch.recorded_spans"]) == ("torch.step", 0, 100, "", 5)
    assert averages(found) == [("c", 1, 0.03), ("a", 1, 0.025), ("b", 2, 0.025)]


def test_what_spans_say_of_themselves_counts():
    """Where a span tells its own time or stands for many, that is taken."""
    table = trace_group(
        ("torch.step", 0, 100, ("a", 0, 50), ("b", 60, 70)),
        attributes=(
            attribute("torch.self_duration", AttributeType.DOUBLE, None, 0.001, None),
            attribute("torch.aggregated.count", AttributeType.INT64, None, None, 40),
        ),
    )
    found = root_only(table, TARGET)
    assert averages(found) == [("b", 40, 0.01), ("a", 1, 0.001)]
    assert attributes_of(found, 0)["torch.recorded_spans"] == 42


def test_what_ran_while_the_loop_waited():
    """What began while the loop waited for data is told apart from the same name elsewhere."""
    table = trace_group(("torch.step", 0, 100, ("torch.phase.data", 0, 30, ("a", 5, 15)), ("a", 40, 45), ("b", 50, 53)))
    assert averages(root_only(table, TARGET)) == [("a", 1, 0.01, "data"), ("a", 1, 0.005), ("b", 1, 0.003)]


def test_the_text_is_short_enough_for_tempo():
    """Very many and very long names, of several bytes a character, leave a whole list of the first of them."""
    rows = [
        ("torch.step", 0, 1000, 0),
        *((f"größer{i}" * (1 + 50 * (i % 2)), i, i + 1 - i / 1000, 1) for i in range(500)),
    ]
    found = root_only(trace_group_of(rows), TARGET)
    assert 900 < len(attributes_of(found, 0)["torch.averages"].encode()) < 1280
    assert averages(found)[0] == ("größer0", 1, 0.001)


def test_collectives_stay_as_times():
    """Of each the group, the number, when the rank came and when the backend's work on it ended; not where there is no such work."""
    said = attributes_of(root_only(with_collectives(), TARGET), 0)["torch.collectives"]
    assert json.loads(said) == [["7", 2, 5000.0, 9000.0], ["7", 3, 10000.0, 30000.0]]


def test_without_the_root_nothing_is_left():
    """A table that holds none of the unit's own span gives none."""
    assert len(root_only(trace_group(("a", 0, 1)), TARGET._replace(span_id=99))) == 0


def test_phases_stay_with_the_root():
    """Phases under the root or under another such phase are left, those inside of a label are not; averages are of what went."""
    phase = "torch.phase."
    table = trace_group(
        (
            "torch.step",
            0,
            100,
            (phase + "forward", 0, 50, ("aten::mm", 0, 20), (phase + "gc", 20, 25, ("aten::add", 21, 22))),
            ("label", 60, 90, (phase + "backward", 60, 80)),
            (phase + "optimizer", 90, 100),
        )
    )
    found = root_only(table, TARGET)
    assert [(name, parent) for name, _, _, parent, _ in displayed(found)] == [
        ("torch.step", ""),
        (phase + "forward", "torch.step"),
        (phase + "gc", phase + "forward"),
        (phase + "optimizer", "torch.step"),
    ]
    assert averages(found) == [
        ("aten::mm", 1, 0.02),
        (phase + "backward", 1, 0.02),
        ("label", 1, 0.01),
        ("aten::add", 1, 0.001),
    ]
    assert attributes_of(found, 0)["torch.recorded_spans"] == 8
