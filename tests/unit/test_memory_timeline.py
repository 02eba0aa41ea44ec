"""``export_memory_timeline``: torch's formats out of what the allocator told."""

from __future__ import annotations

import gzip
import json
import logging
import xml.etree.ElementTree as ET
from importlib.util import find_spec

import numpy as np
import pytest
from memory_runs import Run, parameter

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import MEMORY_COLUMNS
from otel_torchprof._profile import memory_timeline as timeline
from otel_torchprof.errors import TorchProfError

SECOND = 10**9


def profile(*records):
    """A recording of nothing but memory: (time, size, address, and device type, index and flags)."""
    columns = {column.name: np.zeros(len(records), column.dtype) for column in MEMORY_COLUMNS}
    for row, (time, size, address, *device) in enumerate(records):
        columns["time"][row], columns["bytes"][row], columns["address"][row] = time, size, address
        columns["device_type"][row], columns["device_index"][row], columns["flags"][row] = device or (0, -1, 0)
    return Batch.of({"start": []}, [""], memory=columns)


def written(prof, path, device="cpu", used=None):
    timeline.export(prof, str(path), device, used)
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)


LIFE = profile(
    (SECOND, 100, 1),
    (SECOND + 1000, 50, 2),
    (SECOND + 1500, -100, 1),
    (SECOND + 3000, -7, 9),
    (SECOND + 4000, 50, 2),
    (SECOND + 5000, -50, 2),
)
"""Blocks 1 and 2; 9, which was there before; and 2 once more before it was freed."""


def test_raw(tmp_path):
    """Raw points are torch's tuples: what was there before first, at -1; a next version as two; the category unknown."""
    assert written(LIFE, tmp_path / "t.raw.json.gz") == [
        [-1, 1, 7, 7],
        [SECOND, 2, 100, 7],
        [SECOND + 1000, 2, 50, 7],
        [SECOND + 1500, 4, -100, 7],
        [SECOND + 3000, 4, -7, 7],
        [SECOND + 4000, 3, -50, 7],
        [SECOND + 4000, 3, 50, 7],
        [SECOND + 5000, 4, -50, 7],
    ]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t"])
def test_sizes(tmp_path, name):
    """The other suffixes give times in us and bytes by category after each; what was there before stands at the first."""
    times, sizes = written(LIFE, tmp_path / name)
    base = SECOND // 1000
    assert times == [base, base, base + 1, base + 3, base + 4, base + 5]
    assert [row[-1] for row in sizes] == [7, 107, 57, 50, 50, 0]
    assert all(len(row) == 9 and not any(row[:-1]) for row in sizes)


def test_page(tmp_path):
    """The page is one file without anything from elsewhere: a drawing that is well-formed, with the most that was in use."""
    timeline.export(LIFE, str(tmp_path / "t.html"), "cpu")
    text = (tmp_path / "t.html").read_text()
    assert "http" not in text
    assert "<script" not in text
    drawing = ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])  # noqa: S314 - our own
    assert len(drawing.findall("path")) == 2
    assert f"Most in use: {107 / 2**10:.3f} KiB" in text  # at the end of a microsecond


@pytest.mark.parametrize(("size", "unit"), [(3 << 10, "KiB"), (3 << 20, "MiB"), (3 << 30, "GiB")])
def test_units(tmp_path, size, unit):
    """Everything on the page is in the unit in which the most that was in use is a small number."""
    timeline.export(profile((1000, size, 1, 0, -1, 0)), str(tmp_path / "t.html"), "cpu")
    text = (tmp_path / "t.html").read_text()
    assert f"Most in use: 3.000 {unit}" in text
    assert f">Memory ({unit})<" in text
    assert f"most 3.000 {unit}<" in text


@pytest.mark.parametrize("name", ["t.html", "t.json", "t.raw.json.gz"])
def test_nothing(tmp_path, name, caplog):
    """A device that told of nothing gives empty files of the same form, and the page and a warning name those that did."""
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        timeline.export(LIFE, str(tmp_path / name), "cuda:1")
    assert (tmp_path / name).stat().st_size > 0
    said = "nothing was allocated or freed on cuda:1; memory was used on: cpu"
    assert said in caplog.text
    assert not name.endswith(".html") or said in (tmp_path / name).read_text()


def test_devices(tmp_path):
    """Only the device that is asked for counts, by name and index; failures never do."""
    prof = profile((1000, 1, 1, 1, 0, 0), (2000, 2, 1, 1, 1, 0), (3000, 4, 1, 1, 1, 1), (4000, 8, 1, 0, -1, 0))
    assert written(prof, tmp_path / "a.json", "cuda:1")[1] == [[0] * 8 + [2]]
    assert written(prof, tmp_path / "b.json", "cuda")[1] == [[0] * 8 + [1], [0] * 8 + [3]]
    assert written(prof, tmp_path / "c.json", "cpu")[1] == [[0] * 8 + [8]]
    assert written(prof, tmp_path / "d.json", None, "xpu") == [[], []]


def test_errors(tmp_path):
    """A profile without memory, and a device that there is not, are errors that say so."""
    prof = profile()
    with pytest.raises(ValueError, match=r"device='gpu': allowed are .*cuda"):
        timeline.export(prof, str(tmp_path / "t.json"), "gpu")
    with pytest.raises(ValueError, match=r"device='cuda:x': allowed are numbers after the colon"):
        timeline.export(prof, tmp_path / "t.json", "cuda:x")
    with pytest.raises(TorchProfError, match="profile_memory=True"):
        timeline.export(Batch.of({"start": []}, [""]), str(tmp_path / "t.json"), "cpu")


needs_schemas = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed, whose schemas say what an operator writes to"
)


def learning():
    """A parameter that is there before, what is made of it and freed, and its gradient, which stays."""
    run = Run()
    run.operator("randn", makes=0x1000)
    run.operator("fill_", 0x1000)
    run.module("Linear_0", parameter(0x2000, gradient=0x4000, late=True))
    run.operator("mul", 0x1000, 0x2000, makes=0x3000)
    run.backward(0x3000, 0x1000, makes=0x4000)
    run.backward(0x4000, accumulates=True)
    run.release(0x3000)
    run.operator("add_", 0x2000, 0x4000)
    return run.batch()


@needs_schemas
def test_categories(tmp_path):
    """Sizes and raw points have torch's number of what the memory is used for."""
    times, sizes = written(learning(), tmp_path / "t.json")
    assert len(times) == len(sizes) == 5
    assert sizes[:2] == [[0, 8, 0, 0, 0, 0, 0, 0, 0], [0, 8, 0, 8, 0, 0, 0, 0, 0]]
    assert sizes[-1] == [0, 8, 0, 8, 0, 0, 8, 0, 0]
    assert max(row[5] for row in sizes) == 8
    raw = written(learning(), tmp_path / "t.raw.json.gz")
    assert [(action, category) for _, action, _, category in raw if action in {1, 2}] == [
        (1, 0),
        (2, 2),
        (2, 4),
        (2, 5),
    ]


@needs_schemas
def test_a_change_of_use(tmp_path):
    """A block that changes its use moves its bytes from one category to another."""
    run = Run()
    run.operator("randn", makes=0x1000)
    run.operator("relu", 0x1000)
    run.module("Linear_0", parameter(0x2000))
    run.operator("mul", 0x1000, 0x2000, makes=0x3000)
    run.operator("relu", 0x3000)
    run.operator("zero_", 0x1000)
    sizes = written(run.batch(), tmp_path / "t.json")[1]
    assert [row[3] for row in sizes[-2:]] == [8, 0]
    assert [row[5] for row in sizes[-2:]] == [8, 16]
    assert len({sum(row) for row in sizes[-2:]}) == 1
    raw = written(run.batch(), tmp_path / "t.raw.json.gz")
    assert [entry[1:] for entry in raw[-2:]] == [[3, -8, 2], [3, 8, 4]]


@needs_schemas
def test_page_of_categories(tmp_path):
    """The page has one area and one line of its legend for each category that is there, and nothing of the others."""
    timeline.export(learning(), str(tmp_path / "t.html"), "cpu")
    text = (tmp_path / "t.html").read_text()
    drawing = ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])  # noqa: S314 - our own
    names = [line.text for line in drawing.findall("text") if line.find("tspan") is not None]
    assert names == ["GRADIENT", "ACTIVATION", "INPUT", "PARAMETER"]
    colours = {area.get("fill") for area in drawing.findall("path")} - {"none"}
    assert colours == {box.get("fill") for box in drawing.findall("rect")}
    assert "known" not in text


@pytest.mark.parametrize(("missing", "said"), [({"inputs": None}, "no inputs"), ({"frame_info": None}, "no calls")])
def test_what_is_missing_is_said(tmp_path, caplog, missing, said):
    """Where a recording cannot tell what memory is used for, the page and a warning say why."""
    batch = Run()
    batch.operator("relu", 0x1000, makes=0x2000)
    batch.operator("relu", 0x2000)
    timeline.export(batch.batch(**missing), str(tmp_path / "t.html"), "cpu")
    assert said in (tmp_path / "t.html").read_text()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert said in caplog.text


def test_many_columns_become_one_picture(tmp_path):
    """However many changes there are, the picture stays small and shows the highest of them."""
    records = [(1000 * i, 10 if i % 2 else -10, 1) for i in range(1, 100_001)]
    timeline.export(profile(*records), str(tmp_path / "t.html"), "cpu")
    assert (tmp_path / "t.html").stat().st_size < 60_000
