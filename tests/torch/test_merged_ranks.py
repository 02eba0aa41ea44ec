"""``merge`` on what two processes recorded of the same collectives over gloo."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import preloaded
import pytest
from merge_program import COLLECTIVES

import otel_torchprof as otp
from otel_torchprof._files.merge import merge

HERE = Path(__file__).resolve().parent
BOTH = """
import os, pathlib, sys

first = os.fork()
import merge_program
merge_program.main(pathlib.Path(sys.argv[1]), 0 if first else 1)
if first:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder with what the two processes recorded."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join((str(HERE.parents[1]), str(HERE)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = preloaded.run(BOTH, str(folder), environment=environment, timeout=240, has_package=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_steps_without_details(recorded, tmp_path):
    """Where most steps lost their spans, the ends of collectives are known from the steps, and clocks are aligned by them."""
    files = [str(recorded / f"short{rank}.otlp") for rank in range(2)]
    assert merge(files, str(tmp_path / "all.json")).problems == ()
    document = json.loads((tmp_path / "all.json").read_text())
    assert sum(each["name"] == "gloo:all_reduce" for each in document["traceEvents"]) < COLLECTIVES
    assert document["otherData"]["merged_ranks"][1]["collectives"] > 0.9 * COLLECTIVES


def test_ends_of_collectives_agree(recorded, tmp_path):
    """Each rank leaves a collective when the other does, within the error that the file states; the ranks are told by what was recorded."""
    files = [str(recorded / "0.json.gz"), str(recorded / "1.otlp")]
    assert merge(files, str(tmp_path / "all.json")).problems == ()
    document = json.loads((tmp_path / "all.json").read_text())
    info = document["otherData"]["merged_ranks"][1]
    assert info["collectives"] == COLLECTIVES
    ends = [[], []]
    for each in document["traceEvents"]:
        if each["name"] == "gloo:all_reduce":
            ends[each["pid"]].append(each["ts"] + each["dur"])
    assert [len(each) for each in ends] == [COLLECTIVES] * 2
    apart = np.subtract(*(np.sort(each) for each in ends)) * 1000
    assert np.abs(apart).max() <= info["alignment_largest_error_ns"] + 2
    assert np.median(np.abs(apart)) * 1.4826 == pytest.approx(info["alignment_error_ns"], abs=10)
    assert otp.explain(tmp_path / "all.json").ranks == ("rank 0", "rank 1")
