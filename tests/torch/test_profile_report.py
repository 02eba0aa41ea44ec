"""``prof.report()``: the page of a recorded profile and of the same profile from its file."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn

import otel_torchprof as otp
from otel_torchprof._profile.call_sums import memory_curves


def data_in(path):
    """The data of a page."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


@pytest.fixture(scope="module")
def trained():
    """A profile of a few training steps with all that can be recorded of them."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"record_shapes": True, "profile_memory": True, "with_flops": True, "with_modules": True}
    with otp.profile(**options) as prof:
        for _ in range(30):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    return prof


def test_sums_are_those_of_the_averages(trained, tmp_path):
    """Rows have the sums of ``key_averages()``, by name, shapes and module; so have the nodes of the tree, of which modules are."""
    trained.report(tmp_path / "r.html")
    found = data_in(tmp_path / "r.html")
    assert [table["id"] for table in found["tables"]] == ["name", "shape", "module"]
    for table, averages in zip(
        found["tables"],
        (
            trained.key_averages(),
            trained.key_averages(group_by_input_shape=True),
            trained.key_averages(group_by_module=True),
        ),
        strict=True,
    ):
        sums = dict(zip(found["columns"], map(sum, table["rows"]), strict=True))
        assert sums["calls"] == sum(average.count for average in averages)
        assert sums["flops"] == sum(average.flops for average in averages)
        assert sums["self_cpu_memory"] == sum(average.self_cpu_memory_usage for average in averages)
        assert sums["self"] == pytest.approx(1000 * sum(average.self_cpu_time_total for average in averages))
    tree = found["trees"][0]  # others are of samples
    assert sum(tree["own"]["flops"]) == sum(average.flops for average in trained.key_averages())
    [linear] = [at for at, name in enumerate(found["names"]) if name == "aten::addmm"]
    nodes = [node for node, name in enumerate(tree["name"]) if name == linear]
    [average] = [each for each in trained.key_averages() if each.key == "aten::addmm"]
    assert sum(tree["own"]["time"][node] for node in nodes) == pytest.approx(1000 * average.self_cpu_time_total)
    kinds = [found["kinds"][kind] for kind in found["kind_of_name"]]
    assert {"operator", "backward", "module"} <= set(kinds)
    assert found["steps"][0]["count"] == len(trained.steps)


def test_a_file_has_the_same_tables(trained, tmp_path):
    """The page of the profile's file has the rows, the memory and the steps of the profile's own."""
    trained.export_chrome_trace(tmp_path / "t.json")
    loaded = otp.load(tmp_path / "t.json")
    trained.report(tmp_path / "a.html")
    loaded.report(tmp_path / "b.html")
    first, second = data_in(tmp_path / "a.html"), data_in(tmp_path / "b.html")
    own = first["columns"].index("self")
    tables = [
        dict(zip(found["tables"][0]["name"], found["tables"][0]["rows"][own], strict=True)) for found in (first, second)
    ]
    assert tables[0] == pytest.approx(tables[1], abs=1000)
    assert first["memory"][0]["peak"][1] == second["memory"][0]["peak"][1]
    assert first["steps"][0]["number"] == second["steps"][0]["number"]


def test_memory_over_time(trained):
    """The curve has the peak, the allocated bytes and what was in use then, whose blocks add up to it."""
    [curve] = memory_curves(trained._batch(), [(step.number, step.start, step.end) for step in trained.steps])
    memory = trained.memory
    assert curve["allocated"] == int(memory["bytes"][memory["bytes"] > 0].sum())
    assert curve["peak"][1] == max(curve["bytes"])
    assert curve["records"] == len(memory["time"])
    if curve["bytes"][0] >= 0 and not curve["is_total"]:
        assert sum(held[3] for held in curve["held"]) >= curve["peak"][1]


def test_a_profile_without_steps(tmp_path):
    """A profile of one call has its calls and averages, and why it has no verdict."""
    with otp.profile() as prof:
        torch.ones(3) + 1
    prof.report(tmp_path / "r.html")
    found = data_in(tmp_path / "r.html")
    assert "aten::add" in found["tables"][0]["name"]
    assert "has no steps" in found["absent"]["Verdict and steps"]
