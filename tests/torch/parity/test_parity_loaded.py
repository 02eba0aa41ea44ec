"""Traces of every program, this package's and torch's, loaded: the averages of the profiles that wrote them."""

from __future__ import annotations

import re

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig

import otel_torchprof as otp

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of features that are deprecated or in beta

OPTIONS = {"record_shapes": True, "with_stack": True, "profile_memory": True}
VERBOSE = _ExperimentalConfig(verbose=True)  # else torch's events have no stacks
PROFILES = {
    "ours": lambda: otp.profile(**OPTIONS),
    "torch's": lambda: torch.profiler.profile(**OPTIONS, experimental_config=VERBOSE),
}


CALL = re.compile(r".*\(\d+\): |<|nn\.Module: ")


def rows(averages, *, by_stack):
    """What an average says, sorted; times in whole ns. Without the memory of calls, to which torch adds that of other threads."""
    return sorted(
        (
            average.key,
            average.count,
            round(average.cpu_time_total * 1000),
            round(average.self_cpu_time_total * 1000),
            0 if CALL.match(average.key) else average.cpu_memory_usage,
            0 if CALL.match(average.key) else average.self_cpu_memory_usage,
            str(average.input_shapes),
            str(list(average.stack or ())[:5]) if by_stack else "",
        )
        for average in averages
    )


@pytest.mark.parametrize("make", PROFILES.values(), ids=PROFILES)
def test_loaded_averages_are_those_of_the_profile(step, make, tmp_path):
    """By name, by shapes and by stacks, with memory, whatever the program: threads, TorchScript, checkpoints, custom functions."""
    with make() as prof:
        step()
        step()
    prof.export_chrome_trace(str(tmp_path / "t.json"))
    loaded = otp.load(tmp_path / "t.json")
    for groups in ({}, {"group_by_input_shape": True}, {"group_by_stack_n": 5}):
        by_stack = "group_by_stack_n" in groups
        expected = rows(prof.key_averages(**groups), by_stack=by_stack)
        assert rows(loaded.key_averages(**groups), by_stack=by_stack) == expected
