"""The texts of ranges are torch's: both make them of the same program, through the same way out."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from observed import succeeds
from range_library import ITT, TORCH, Log, compiled

torch = pytest.importorskip("torch", minversion="2.6")

from otel_torchprof import emit_itt, emit_nvtx, record_function  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = {"nvtx": emit_nvtx, "itt": emit_itt}


def body():
    """Operators, lists of tensors, several outputs, missing tensors, a backward pass. Everything that is made stays."""
    kept = [torch.ones(2, 3, requires_grad=True), torch.ones(3, 4), torch.ones(4, 4)]
    kept.append(torch.mm(kept[0], kept[1]))
    kept.append(torch.cat([kept[3], kept[3]]).sum())
    kept.extend(torch.split(kept[2], 2))
    kept.append(kept[5] + kept[6])
    kept.extend(torch.max(kept[7], dim=0))
    kept.append(kept[9] + kept[9])
    kept.append(torch.stack([kept[1]] * 40))
    kept.extend(torch._foreach_add([kept[1], kept[2]], [kept[1], kept[2]]))
    kept.append(torch.ops.aten.index(kept[2], [None, torch.tensor([1])]))
    kept.append(torch.nn.functional.linear(kept[1], kept[2], None))
    kept.append(torch.empty(0, 3))
    with torch.autograd.profiler.record_function("label é", "argument"):
        kept[4].backward()
    return kept


def normal(lines, *, whole):
    """Per thread: operator ids and sequence numbers by the order in which they come.

    Only tensors that stay have a producer that does not depend on where the next tensor was put: those are the inputs of
    the outermost operators. Of the others only their count stays.
    """
    numbers, found, depths = {("op_id", "0"): 0}, {}, {}
    for thread, what, written in lines:
        for match in re.finditer(r"(op_id|seq) = (\d+)", written):
            numbers.setdefault(match.groups(), len(numbers))
        text = re.sub(r"(op_id|seq) = (\d+)", lambda m: f"{m[1]} = {numbers[m.groups()]}", written)
        top_level = whole and depths.get(thread, 0) == 0
        named = (lambda m: f"({numbers['op_id', m[1]]},{m[2]})") if top_level else "()"
        depths[thread] = depths.get(thread, 0) + {"push": 1, "pop": -1, "mark": 0}[what]
        found.setdefault(thread, []).append((what, re.sub(r"\((\d+),(-?\d+)\)", named, text)))
    return list(found.values())


def compare(library, kind, shapes):
    """Run in a process of its own, since what torch's ways are is one setting of the process."""
    torch.cuda.synchronize = lambda *_: None
    log = Log(library)
    log.native.log_register()
    for _ in range(3):  # what is made on the first use is made
        body()
    both = []
    theirs = getattr(torch.autograd.profiler, f"emit_{kind}")
    for manager in (theirs(record_shapes=shapes), OURS[kind](record_shapes=shapes, as_documented=False)):
        log.clear()
        with manager:
            kept = body()
        both.append(normal(log.lines(), whole=shapes))
        kept.clear()
    assert len(both[0][0]) > 100
    assert both[1] == both[0]


def in_process(folder, program, *, has_torch=False, **environment):
    """Runs a program that has the modules of this folder in a process of its own; its output."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "tests/torch", "tests/helpers"))
    return succeeds(program, has_torch=has_torch, PYTHONPATH=paths, STAND_IN=str(folder), **environment)


@pytest.fixture(scope="module")
def way(tmp_path_factory):
    """A library that stands for torch's own ways to NVTX and ITT."""
    return compiled(TORCH, tmp_path_factory.mktemp("ranges"), "way")


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("nvtx", True),
        ("itt", False),
        pytest.param("nvtx", False, marks=pytest.mark.exhaustive),
        pytest.param("itt", True, marks=pytest.mark.exhaustive),
    ],
)
def test_texts_are_torchs_to_the_letter(way, kind, shapes):
    """Names, numbers, sizes and producers are those that torch writes for the same program, range by range."""
    program = f"import os, test_range_texts as t; t.compare(os.environ['STAND_IN'], {kind!r}, {shapes})"
    in_process(way, program, has_torch=True)


COLLECTED = """
import os
import torch
from observed import succeeds
from range_library import Log
import otel_torchprof as otp

log = Log(os.environ["INTEL_LIBITTNOTIFY64"])
tensor = torch.ones(2, 3)
with otp.emit_itt(record_shapes=True) as ranges:
    with otp.record_function("label"):
        torch.neg(tensor)
    ranges.mark("now")
print(*log.tree(), sep="\\n")
"""


def test_itt_reaches_the_collector(tmp_path):
    """With nothing replaced in torch, ranges and marks arrive at the collector that the environment names."""
    library = compiled(ITT, tmp_path, "itt")
    lines = in_process(library, COLLECTED, INTEL_LIBITTNOTIFY64=str(library)).splitlines()
    assert lines == ["__start_profile", "label", " aten::neg, sizes = [[2, 3]]", "now", "__stop_profile"]


def test_without_a_collector_itt_goes_nowhere():
    """Outside of VTune a program with emit_itt in it runs on, as with torch's."""
    with emit_itt(record_shapes=True), record_function("label"):
        assert torch.neg(torch.ones(1)).item() == -1
