"""The report of a program that runs out of memory: which errors count, what torch says of its devices, and torch's snapshot."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace

import pytest

from otel_torchprof._answers import out_of_memory
from otel_torchprof._answers.kept_memory import DeviceMemory
from otel_torchprof._answers.out_of_memory import is_out_of_memory, notice, requested_bytes
from otel_torchprof._answers.steps import KeptMemory

MIB = 1 << 20
OF_CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free. Of the "
    "allocated memory 70.00 GiB is allocated by PyTorch"
)
OF_CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."


class OutOfMemoryError(RuntimeError):
    """As ``torch.OutOfMemoryError``, which is ``torch.cuda.OutOfMemoryError`` too."""


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (OutOfMemoryError(OF_CUDA), True),
        (RuntimeError(OF_CPU), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_count(error, counts):
    """Torch's errors of any device and Python's own do, others do not."""
    assert is_out_of_memory(error) is counts


@pytest.mark.parametrize(("text", "size"), [(OF_CUDA, 5 << 29), (OF_CPU, 4096), ("", None)])
def test_the_size_is_that_of_the_message(text, size):
    """The request that failed has the size that torch says, in its units."""
    assert requested_bytes(text) == size


@pytest.fixture
def report(monkeypatch, tmp_path):
    """Reports an error with what is in use, and returns the folder."""
    monkeypatch.setattr(out_of_memory, "made_folder", lambda _name: tmp_path)
    monkeypatch.setattr(out_of_memory, "boxes_folder", lambda: None)

    def reported(in_use=()):
        monkeypatch.setattr(out_of_memory, "_noticed", out_of_memory._Noticed())
        notice(OutOfMemoryError(OF_CUDA), None, lambda: list(in_use), is_profile=True)
        return tmp_path

    return reported


def use_cuda(monkeypatch, *, blocks=7, snapshot=lambda: {"segments": []}):
    """A CUDA device with 600 MiB in use, as torch reports it."""
    stats = {
        "allocated_bytes.all.current": 600 * MIB,
        "allocated_bytes.all.peak": 700 * MIB,
        "reserved_bytes.all.current": 800 * MIB,
        "allocation.all.current": blocks,
        "num_ooms": 1,
    }
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        memory_stats=lambda _index: stats,
        get_device_properties=lambda _index: SimpleNamespace(total_memory=1024 * MIB),
    )
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    monkeypatch.setitem(sys.modules, "torch.cuda.memory", SimpleNamespace(_snapshot=snapshot))


def test_what_torch_says_of_a_device(monkeypatch, report, capfd):
    """The file has torch's own numbers, and its table adds up to what torch's allocator has; the snapshot is torch's, pickled."""
    use_cuda(monkeypatch, snapshot=lambda: {"segments": [1, 2]})
    kept = [KeptMemory("forward", "Net.encoder", "aten::linear", 300 * MIB, 3), KeptMemory("", "", "", 100 * MIB, 1)]
    folder = report([DeviceMemory("cuda:0", 1, kept)])
    (text,) = (path.read_text() for path in folder.glob("*.txt"))
    assert "cuda:0: 600 MiB allocated, 800 MiB reserved, at most 700 MiB allocated, of 1 GiB\n" in text
    assert "    num_ooms: 1\n" in text
    table = text.partition("in use on cuda:0:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split(maxsplit=1)[0] for line in table[1:]] == [f"{size * MIB:,}" for size in (300, 100, 200, 600)]
    assert [line[33:] for line in table[1:]] == [
        "forward, Net.encoder, aten::linear",
        "no operator",
        "not recorded: allocated earlier, or on other threads",
        "total",
    ]
    assert "2.5 GiB requested" in capfd.readouterr().err
    (snapshot,) = folder.glob("*.pickle")
    assert snapshot.read_bytes() == pickle.dumps({"segments": [1, 2]})


def fails():
    raise RuntimeError("the driver is lost")


@pytest.mark.parametrize(
    "options",
    [{"blocks": 10**6}, {"snapshot": lambda: bytes(20 * MIB)}, {"snapshot": fails}],
    ids=["many blocks", "large", "lost"],
)
def test_no_snapshot_that_is_too_large(monkeypatch, report, options):
    """A snapshot of too many blocks, one that is too large, and one that torch refuses leave no file; the report is there."""
    use_cuda(monkeypatch, **options)
    folder = report()
    assert [path.suffix for path in folder.iterdir()] == [".txt"]


def test_the_table_is_short(report):
    """Of 10,000 places the largest 100 have a row each and the others one together; the file has at most 64 KiB, also with long names."""
    kept = [KeptMemory("", f"{'x' * 2000}.{number}", "aten::add", 10_000 - number, 1) for number in range(10_000)]
    (path,) = report([DeviceMemory("cpu", -1, kept)]).glob("*.txt")
    assert path.stat().st_size <= 64 << 10
    kept = [each._replace(module="") for each in kept]
    (path,) = report([DeviceMemory("cpu", -1, kept)]).glob("*.txt")
    table = path.read_text().partition("in use on cpu:\n")[2].partition("\n\n")[0].splitlines()
    assert len(table) == 1 + 100 + 2
    assert table[-2].endswith("9,900 other places")
    assert table[-1].split() == [f"{sum(each.bytes for each in kept):,}", "total"]


def test_hidden_attributes_are_not_in_the_report(monkeypatch, report):
    """Names of modules and lines of code that spans hide are not in the file either."""
    monkeypatch.setenv("OTEL_TORCHPROF_HIDDEN_ATTRIBUTES", "torch.module,code.line.number")
    kept = [KeptMemory("forward", "Net.secret", "aten::add", 5, 1, "secret.py(1): secret")]
    (path,) = report([DeviceMemory("cpu", 5, kept)]).glob("*.txt")
    assert "secret" not in path.read_text()
    assert ".py" not in path.read_text()
