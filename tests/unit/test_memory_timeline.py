"""``export_memory_timeline``: torch's formats out of what the allocator told."""

from __future__ import annotations

import gzip
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from otel_torchprof import _memory_timeline as timeline
from otel_torchprof._columns.schema import MEMORY_COLUMNS
from otel_torchprof.errors import TorchProfError

SECOND = 10**9


class Profile:
    """What is asked of a profile."""

    def __init__(self, *records, used=None):
        self.use_device = used
        columns = {column.name: np.zeros(len(records), column.dtype) for column in MEMORY_COLUMNS}
        for row, (time, size, address, *device) in enumerate(records):
            columns["time"][row], columns["bytes"][row], columns["address"][row] = time, size, address
            columns["device_type"][row], columns["device_index"][row], columns["flags"][row] = device or (0, -1, 0)
        self.memory = columns


def written(prof, path, device="cpu"):
    timeline.export(prof, str(path), device)
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)


LIFE = Profile(
    (SECOND, 100, 1),
    (SECOND + 1000, 50, 2),
    (SECOND + 1500, -100, 1),
    (SECOND + 3000, -7, 9),
    (SECOND + 4000, 50, 2),
    (SECOND + 5000, -50, 2),
)
"""Blocks 1 and 2; 9, which was there before; and 2 once more before it was given back."""


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
    assert f"Most in use: {157 / 2**20:.3f} MiB" in text


@pytest.mark.parametrize("name", ["t.html", "t.json", "t.raw.json.gz"])
def test_nothing(tmp_path, name):
    """A device that told of nothing gives empty files of the same form."""
    timeline.export(LIFE, str(tmp_path / name), "cuda:1")
    assert (tmp_path / name).stat().st_size > 0


def test_devices(tmp_path):
    """Only the device that is asked for counts, by name and index; failures never do."""
    prof = Profile(
        (1000, 1, 1, 1, 0, 0), (2000, 2, 1, 1, 1, 0), (3000, 4, 1, 1, 1, 1), (4000, 8, 1, 0, -1, 0), used="xpu"
    )
    assert written(prof, tmp_path / "a.json", "cuda:1")[1] == [[0] * 8 + [2]]
    assert written(prof, tmp_path / "b.json", "cuda")[1] == [[0] * 8 + [1], [0] * 8 + [3]]
    assert written(prof, tmp_path / "c.json", "cpu")[1] == [[0] * 8 + [8]]
    assert written(prof, tmp_path / "d.json", None) == [[], []]


def test_errors(tmp_path):
    """A profile without memory, and a device that there is not, are errors that say so."""
    prof = Profile()
    with pytest.raises(ValueError, match=r"device='gpu': allowed are .*cuda"):
        timeline.export(prof, str(tmp_path / "t.json"), "gpu")
    prof.memory = None
    with pytest.raises(TorchProfError, match="profile_memory=True"):
        timeline.export(prof, str(tmp_path / "t.json"), "cpu")


def test_many_columns_become_one_picture(tmp_path):
    """However many changes there are, the picture stays small and shows the highest of them."""
    records = [(1000 * i, 10 if i % 2 else -10, 1) for i in range(1, 100_001)]
    timeline.export(Profile(*records), str(tmp_path / "t.html"), "cpu")
    assert (tmp_path / "t.html").stat().st_size < 60_000
