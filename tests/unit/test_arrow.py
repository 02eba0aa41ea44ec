"""Tables of pyarrow, and Parquet: the sums in them are those of the averages, wherever they are read."""

from __future__ import annotations

import functools
import sys

import numpy as np
import pytest
import torch
from explained_files import STEP_MS, Trace
from table_files import BASE, MS, NAMES, STEPS, profile_of, rank_profile

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._columns.batch import Batch
from otel_torchprof._encode.arrow import TABLES

REASON = "tries tables of pyarrow"
pa = pytest.importorskip("pyarrow", reason=REASON)
duckdb = pytest.importorskip("duckdb", reason=REASON)
parquet = pytest.importorskip("pyarrow.parquet", reason=REASON)


def averages(prof):
    """By name: calls, total and self time in ns, net bytes of the processor."""
    return {
        each.key: (
            each.count,
            round(each.cpu_time_total * 1000),
            round(each.self_cpu_time_total * 1000),
            each.self_cpu_memory_usage,
        )
        for each in prof.key_averages()
    }


def labelled():
    """A profile of some labels in steps."""
    with otp.profile(operators=False) as prof:
        for _ in range(4):
            with otp.record_function("outer"), otp.record_function("inner"):
                pass
            prof.step()
    return prof


SUMS = "select name, sum(count), sum(total), sum(self), coalesce(sum(self_cpu_memory_usage), 0) from {} group by name"


def test_sums_of_parquet_are_those_of_the_averages(tmp_path):
    """DuckDB and pandas find in the file what ``key_averages()`` has."""
    prof = labelled()
    prof.export_as(tmp_path / "x.parquet")
    found = duckdb.sql(SUMS.format(f"'{tmp_path}/x.parquet'")).fetchall()
    assert {name: tuple(map(int, rest)) for name, *rest in found} == averages(prof)
    pandas = pytest.importorskip("pandas", reason=REASON)
    frame = pandas.read_parquet(tmp_path / "x.parquet")
    sums = frame.groupby("name", observed=True)[["count", "total", "self"]].sum()
    assert {name: (*row, 0) for name, row in zip(sums.index, sums.to_numpy().tolist(), strict=True)} == averages(prof)
    assert frame["start"].min().value == int(prof.columns["start"].min())


def test_columns_of_every_table():
    """Each table has its columns, with their types and units, whatever was recorded; texts are dictionaries."""
    for prof in (labelled(), rank_profile(0)):
        for name, fields in TABLES.items():
            schema = prof.to_arrow(name).schema
            assert schema.names == [field.name for field in fields]
            for field, made in zip(fields, schema, strict=True):
                kind = (
                    "dictionary<values=string" if field.type.startswith("dict") else field.type.replace(", ", ", tz=")
                )
                assert str(made.type).startswith(kind.replace("float64", "double"))
                assert (made.metadata or {}).get(b"unit", b"").decode() == field.unit


def test_steps_phases_modules_and_parents_of_events():
    """Events say where they are; times are to the nanosecond; what does not apply is null."""
    table = rank_profile(1).to_arrow()
    start = table["start"].cast(pa.int64()).to_pylist()
    rows = table.drop_columns(["start", "end"]).to_pylist()[:5]
    assert start[1] == BASE + MS
    assert [row["parent"] for row in rows] == [None, *(row["id"] for row in rows[:3]), None]
    assert [row["kind"] for row in rows] == ["phase", "module", "operator", "operator", "operator"]
    assert [row["phase"] for row in rows] == ["forward"] * 4 + [None]
    assert [row["module"] for row in rows] == [None, *["Model"] * 3, None]
    assert [row["step"] for row in rows] == [0] * 5
    assert [row["total"] for row in rows[:4]] == [8 * MS, 6 * MS, 4 * MS, 2 * MS]
    assert [row["self"] for row in rows[:4]] == [2 * MS] * 4
    assert [row["allocated"] for row in rows] == [64, 0, 64, 0, 64]
    assert {row["flops"] for row in rows} == {row["rank"] for row in rows} == {None}
    assert {row["thread_name"] for row in rows} == {"main"}


def test_other_tables():
    """Steps, collectives, samples and allocations have a row each, with names for indices, and the step."""
    prof = rank_profile(1)
    tables = {name: prof.to_arrow(name).to_pydict() for name in ("collectives", "memory")}
    assert prof.to_arrow("steps")["total"].to_pylist() == [10 * MS] * (STEPS - 1) + [18 * MS]
    assert tables["collectives"]["backend"] == ["gloo"] * STEPS
    assert tables["collectives"]["group_rank"] == [1] * STEPS
    assert tables["collectives"]["step"] == list(range(STEPS))
    assert tables["memory"]["bytes"][:2] == [64, -64]
    samples = prof.to_arrow("samples")
    assert samples["line"].to_pylist()[:2] == ["train.py:9 load", "train.py:5 log"]
    assert samples["stack"].to_pylist()[1] == "train.py:5 log\ntrain.py:22 main"
    with pytest.raises(ValueError, match="'events', 'steps', 'collectives', 'samples', 'memory'"):
        prof.to_arrow("spans")


def test_columns_are_not_copied():
    """Times and ids are those of the recording, where all of its events are displayed in order."""
    prof = labelled()
    table = prof.to_arrow()
    for name in ("id", "start", "end"):
        address = table[name].chunk(0).buffers()[1].address
        assert address == prof.columns[name].ctypes.data


def test_hostile_names(tmp_path):
    """NUL, lone surrogates, invalid UTF-8 and 10 kB go into Parquet and back; names that are equal then share an entry."""
    names = ["", "a\0b", "\ud800", b"\xff\xfe", "x" * 10_000, "\udc80", "\U0001f600"]
    columns = {"start": list(range(6)), "end": list(range(1, 7)), "name": list(range(1, 7))}
    prof = profile_of(Batch.of(columns, names), [])
    prof.export_as(tmp_path / "x.parquet")
    found = parquet.read_table(tmp_path / "x.parquet")["name"].to_pylist()
    assert [found[0], found[3], found[5]] == ["a\0b", "x" * 10_000, "\U0001f600"]
    assert len(found) == 6
    assert set(duckdb.read_parquet(f"{tmp_path}/x.parquet").select("name").fetchall()) == {(name,) for name in found}


def test_an_empty_profile(tmp_path):
    """Nothing was recorded: the tables and the file have their columns and no row."""
    with otp.profile(operators=False, sampling=False) as prof:
        pass
    prof.export_as(tmp_path / "x.parquet")
    assert parquet.read_table(tmp_path / "x.parquet").num_rows == 0
    assert [prof.to_arrow(name).num_rows for name in TABLES] == [0] * len(TABLES)


def test_a_large_file_has_several_row_groups(tmp_path):
    """Rows are written some at a time, and all of them are there."""
    count = 300_000
    start = np.arange(count) * 10
    batch = Batch.of({"start": start, "end": start + 5, "name": np.arange(count) % 3 + 1}, NAMES)
    profile_of(batch, []).export_as(tmp_path / "x.parquet")
    file = parquet.ParquetFile(tmp_path / "x.parquet")
    assert (file.metadata.num_rows, file.metadata.num_row_groups) == (count, 3)


def test_convert_and_names(tmp_path, capsys):
    """``convert`` writes Parquet of any file and says what it lacks; a name in ``.parquet.gz`` is none."""
    prof = labelled()
    prof.export_as(tmp_path / "t.json.gz")
    assert cli.main(["convert", "-q", str(tmp_path / "t.json.gz"), "-o", str(tmp_path / "x.parquet")]) == 0
    assert "no single allocations in the output" in capsys.readouterr().err
    assert parquet.read_table(tmp_path / "x.parquet").num_rows == len(prof.events())
    assert cli.main(["convert", "-q", str(tmp_path / "t.json.gz"), "-o", str(tmp_path / "x.parquet.gz")]) == 1
    assert ".otlp-profiles.gz, .parquet" in capsys.readouterr().err
    with pytest.raises(ValueError, match="must end in"):
        prof.export_as(tmp_path / "trace.txt")


def test_without_pyarrow(monkeypatch, tmp_path, capsys):
    """Where pyarrow is missing the error says what to install, and no file is left."""
    prof = labelled()
    prof.export_as(tmp_path / "t.json")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for failing in (prof.to_arrow, lambda: prof.export_as(tmp_path / "x.parquet")):
        with pytest.raises(ImportError, match=r"pip install 'otel-torchprof\[arrow\]'"):
            failing()
    assert cli.main(["convert", "-q", str(tmp_path / "t.json"), "-o", str(tmp_path / "x.parquet")]) == 1
    assert "otel-torchprof[arrow]" in capsys.readouterr().err
    assert not (tmp_path / "x.parquet").exists()


def test_what_steps_did(tmp_path):
    """Steps have what their spans say of phases, tokens and MFU, as show --steps has; of a profile with shapes, operations."""
    trace = Trace()
    for number in range(3):
        trace.step(STEP_MS, data=0.25, torch__step__tokens=500 + number, torch__step__mfu=0.5)
    file = trace.chrome(tmp_path / "t.json")
    as_written = {'"torch.step"': '"ProfilerStep#0"', '"cat": "x"': '"cat": "user_annotation"'}
    file.write_text(functools.reduce(lambda text, change: text.replace(*change), as_written.items(), file.read_text()))
    table = otp.load(file).to_arrow("steps")
    assert table["tokens"].to_pylist() == [500, 501, 502]
    assert [table[name].to_pylist() for name in ("mfu", "samples")] == [[0.5] * 3, [None] * 3]
    assert table["data"].to_pylist() == [pytest.approx(table["total"][0].as_py() / 4)] * 3
    assert set(table["optimizer"].to_pylist()) == {None}
    x = torch.ones(8, 8)
    with otp.profile(record_shapes=True) as prof:
        for _ in range(2):
            x @ x
            prof.step()
        x + x
    assert prof.to_arrow("steps")["flops"].to_pylist() == [1024, 1024, None]
