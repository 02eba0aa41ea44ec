"""Dumps of PyTorch's flight recorder, written by PyTorch itself."""

from __future__ import annotations

import os

import preloaded
import pytest

from otel_torchprof._files.flight_recorder import read_dump

PROGRAM = """
import os
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # is read when the first process group is made
import pathlib, pickle, time, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3, 4)
dist.all_reduce(tensor)
dist.broadcast(tensor, 0)
deadline = time.monotonic() + 60
# gloo's own thread retires an operation, after what waited for the operation has continued.
while not all(entry["retired"] for entry in pickle.loads(c10d._dump_fr_trace(True, False))["entries"]):
    assert time.monotonic() < deadline, "torch retired no operation in a minute"
for name, dump in (("pickle", lambda: c10d._dump_fr_trace(True, False)), ("json", c10d._dump_fr_trace_json)):
    pathlib.Path(f"rank_0.{name}").write_bytes(dump())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With both forms of a dump."""
    found = tmp_path_factory.mktemp("dumps")
    done = preloaded.run(PROGRAM, environment=dict(os.environ), folder=found)
    if "_dump_fr_trace'" in done.stderr:
        pytest.skip("this release of torch has no flight recorder for gloo")
    assert done.returncode == 0, done.stderr
    return found


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_what_torch_writes(folder, form):
    """Names, numbers, types, sizes and states of torch's own dump are read, in both of its forms."""
    calls = read_dump(folder / f"rank_0.{form}", 0).calls
    assert [(call.name, call.sequence_nr, call.dtype, call.bytes_in, call.shapes) for call in calls] == [
        ("all_reduce", 1, "float", 48, "[[3, 4]]"),
        ("broadcast", 2, "float", 48, "[[3, 4]]"),
    ]
    assert all(call.completed_ns and call.timeout_ns and call.group == "0" for call in calls)
