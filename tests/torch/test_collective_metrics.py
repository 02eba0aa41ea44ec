"""How long ranks wait for each other, as a metric, by four ranks under torchrun over gloo: one run of waits_program.py."""

from __future__ import annotations

import json

import pytest
from launched import launched
from waits_program import LATE, STEPS

RANKS = range(4)


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """By rank, what it knows of its waits."""
    folder = tmp_path_factory.mktemp("waits")
    done = launched("waits_program", folder)
    written = [folder / f"{rank}.json" for rank in RANKS]
    assert all(path.exists() for path in written), done.stderr
    return [json.loads(path.read_text()) for path in written]


def test_every_rank_has_its_waits_at_the_least_detail(reported):
    """Each step has one value for the group, at ``steps``; a broadcast, which its root leaves before the others, has none."""
    assert [each["state"] for each in reported] == ["on"] * 4
    assert [[point[:2] for point in each["waits"]] for each in reported] == [[["0", STEPS]]] * 4


def test_others_wait_for_the_late_rank(reported):
    """The others have waited at least as long as the last one has let them wait since all of them had called."""
    held = reported[LATE]["held"]
    waits = [each["waits"][0][2] for each in reported]
    assert held > 0
    assert all(waits[rank] >= held for rank in RANKS if rank != LATE)
    assert waits[LATE] > 0
