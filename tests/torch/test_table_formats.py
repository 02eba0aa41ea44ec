"""OTLP profiles, Parquet and SQL of a trained model: their sums are those of ``key_averages()``."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
import torch
from profile_messages import read, samples
from torch import nn

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._model.call_tree import call_tree
from otel_torchprof._model.paths import event_amounts, event_parents
from otel_torchprof._model.tree import display_name

REASON = "tries tables of pyarrow"


@pytest.fixture(scope="module", params=[{"with_stack": True}, {"with_modules": True}, {}], ids=str)
def prof(request):
    """A profile of three steps of a small transformer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    settings = {"record_shapes": True, "profile_memory": True, "with_flops": True}
    with otp.profile(**settings, **request.param) as profiled:
        for _ in range(3):
            with otp.record_function("forward"):
                loss = model(torch.randn(2, 8, 16)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiled.step()
    return profiled


def averages(prof):
    """By name: calls, total time in ns, FLOPs; and the self time, but of what modules may be directly in."""
    found = {}
    for each in prof.key_averages():
        own = None if each.key == "forward" else round(each.self_cpu_time_total * 1000)
        found[each.key] = (each.count, round(each.cpu_time_total * 1000), each.flops or 0, own)
    return found


def test_paths(prof):
    """Sums by path, added up by name, are the averages; times without those of children add up."""
    info = prof.events()._source.with_modules()
    view, amounts = info.view, event_amounts(info)
    tree = call_tree(event_parents(info), view.display_name[view.rows].astype(np.int64), amounts)
    found = {}
    for number, name in enumerate(tree.key.tolist()):
        columns = (tree.own[column].item(number) for column in ("calls", "flops", "time"))
        before = found.get(key := display_name(view.batch.names[name]), (0, 0, 0))
        found[key] = tuple(old + new for old, new in zip(before, columns, strict=True))
    for name, (calls, _, flops, own) in averages(prof).items():
        assert found[name][:2] == (calls, flops), name
        assert own is None or own == found[name][2]
    assert tree.own["time"].sum() == view.self_time.sum()


def test_otlp_profiles(prof, tmp_path):
    """Calls, FLOPs and self times by name of the innermost call are the averages; allocations are there, too.

    Self times of Python calls that labels overlap are negative there: those of Python calls are left out.
    """
    prof.export_as(tmp_path / "p.otlp-profiles")
    found = {}
    for (kind, calls, _), value in samples(read(tmp_path / "p.otlp-profiles")).items():
        name, file, line = calls[-1]
        key = f"{file}({line}): {name}" if file else name
        found.setdefault(key, {}).setdefault(kind, 0)
        found[key][kind] += value
    assert any("allocated" in sums for sums in found.values())
    for name, (calls, _, flops, own) in averages(prof).items():
        assert (found[name]["calls"], found[name].get("flops", 0)) == (calls, flops), name
        assert own is None or "(" in name or own == found[name].get("time", 0), name


def test_parquet_and_sql(prof, tmp_path, capsys):
    """DuckDB finds the averages in Parquet, and ``otel-torchprof sql`` those of a file in its tables."""
    duckdb = pytest.importorskip("duckdb", reason=REASON)
    pytest.importorskip("pyarrow", reason=REASON)
    query = "select name, sum(count), sum(total), sum(coalesce(flops, 0)), sum(self) from {} where kind <> 'module' group by name"
    prof.export_as(tmp_path / "x.parquet")
    rows = duckdb.sql(query.format(f"'{tmp_path}/x.parquet'")).fetchall()
    prof.export_as(tmp_path / "t.json.gz")
    capsys.readouterr()
    assert cli.main(["sql", "-q", "--csv", query.format("events"), str(tmp_path / "t.json.gz")]) == 0
    of_file = list(csv.reader(io.StringIO(capsys.readouterr().out)))[1:]
    for found, averaged in ((rows, averages(prof)), (of_file, averages(otp.load(tmp_path / "t.json.gz")))):
        by_name = {name: tuple(map(int, rest)) for name, *rest in found}
        assert by_name.keys() == averaged.keys()
        for name, (*expected, own) in averaged.items():
            assert list(by_name[name][:3]) == expected, name
            assert own is None or own == by_name[name][3]
