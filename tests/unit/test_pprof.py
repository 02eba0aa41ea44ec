"""pprof's format: stacks, values and labels, read by the class of its own proto file."""

from __future__ import annotations

import gzip
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kineto_events import cuda_trace
from pprof_classes import read, samples, sums_by_name
from sampled_profiles import MS, profile_with
from sampled_profiles import samples as taken

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import Kind
from otel_torchprof._encode import pprof
from otel_torchprof._encode.protobuf import put_varints, varint, varint_sizes
from otel_torchprof._model.event_info import EventInfo
from otel_torchprof._model.event_table import EventTable
from otel_torchprof._model.step_spans import RecordedStep


def written(columns, names, path, steps=(), rank=None, **rest):
    """A file of a batch of these columns."""
    info = EventInfo.of(Batch.of(columns, names, **rest), modules=True, with_flops=False, with_devices=False)
    path.write_bytes(b"".join(pprof.encode(EventTable(info, steps, rank), (10, 50))))
    return read(path)


def test_sums_are_those_of_the_averages(tmp_path):
    """Calls and self times by name, and of recorded allocations the bytes, are those of the profile; gzip is as the name ends."""
    with otp.profile(operators=False) as prof:
        for _ in range(5):
            with otp.record_function("outer"), otp.record_function("inner"):
                pass
            prof.step()
    prof.export_as(tmp_path / "p.pb.gz")
    found = read(tmp_path / "p.pb.gz")
    averages = prof.key_averages()
    assert sums_by_name(found, "calls") == {average.key: average.count for average in averages}
    assert sums_by_name(found, "time") == {a.key: round(a.self_cpu_time_total * 1000) for a in averages}
    assert {labels["step"] for stack, labels, _ in samples(found) if "inner" in stack} == set("01234")
    assert found.string_table[found.default_sample_type] == "time"
    assert found.time_nanos == prof.health.start_ns
    assert gzip.decompress((tmp_path / "p.pb.gz").read_bytes())


def test_stacks_are_split_by_step_phase_and_rank(tmp_path):
    """Equal stacks in one step and phase are one sample; their values are added up; times have the recording's start."""
    columns = {
        "start": [10, 11, 13, 20, 30, 31],
        "end": [18, 12, 14, 25, 40, 33],
        "name": [1, 2, 2, 2, 1, 2],
        "parent": [-1, 0, 0, -1, -1, 4],
        "kind": [Kind.PHASE, *[Kind.OPERATOR] * 3, Kind.PHASE, Kind.OPERATOR],
        "fwd_thread": [Part.FORWARD, 0, 0, 0, Part.BACKWARD, 0],
    }
    steps = [RecordedStep(0, 10, 30), RecordedStep(1, 30, 50)]
    found = written(columns, ["", "phase", "op"], tmp_path / "p.pb", steps, rank=3)
    assert sorted(
        (stack, sorted(labels.items()), *values.values()) for stack, labels, values in samples(found)
    ) == sorted(
        [
            (("phase",), [("phase", "forward"), ("rank", "3"), ("step", "0")], 1, 6),
            (("phase", "op"), [("phase", "forward"), ("rank", "3"), ("step", "0")], 2, 2),
            (("op",), [("rank", "3"), ("step", "0")], 1, 5),
            (("phase",), [("phase", "backward"), ("rank", "3"), ("step", "1")], 1, 8),
            (("phase", "op"), [("phase", "backward"), ("rank", "3"), ("step", "1")], 1, 2),
        ]
    )
    assert (found.time_nanos, found.duration_nanos) == (10, 40)


def test_python_calls_have_their_file_and_line(tmp_path):
    """The name of a call is taken apart; a built-in function, whose name pprof would take for a template, keeps its own."""
    names = ["", "a dir/x(1).py(12): f.<locals>", "<built-in function len>", "(no): line"]
    columns = {"start": [1, 2, 5], "end": [4, 3, 6], "name": [1, 2, 3], "parent": [-1, 0, -1], "kind": [Kind.FRAME] * 3}
    found = written(columns, names, tmp_path / "p.pb")
    texts = found.string_table
    functions = [(texts[f.name], texts[f.system_name], texts[f.filename]) for f in found.function]
    assert functions == [
        ("f.<locals> a dir/x(1).py:12", names[1], "a dir/x(1).py"),
        ("<built-in function len>", "", ""),
        ("(no): line", "", ""),
    ]
    assert [location.line[0].line for location in found.location] == [12, 0, 0]


def test_sampled_stacks_have_values_of_their_own(tmp_path):
    """Samples of Python stacks are beside the operators, with their number and time, so that no time counts twice."""
    prof = profile_with(taken([5 * MS, 12 * MS, 29 * MS, 31 * MS, 59 * MS], [0, 1, 0, 2, 1]))
    prof.export_as(tmp_path / "p.pb")
    found = samples(read(tmp_path / "p.pb"))
    sampled = {stack: values for stack, labels, values in found if values["samples"] and labels == {"step": "0"}}
    assert {stack: (v["samples"], v["sampled"], v["time"], v["calls"]) for stack, v in sampled.items()} == {
        ("main train.py", "log_metrics train.py"): (2, 20 * MS, 0, 0),
        ("main train.py", "Adam.step /usr/lib/python3/site-packages/torch/optim/adam.py"): (1, 10 * MS, 0, 0),
    }
    assert sum(values["sampled"] for _, _, values in found) == 50 * MS
    assert sum(values["calls"] for _, _, values in found) == 7


def test_device_time_is_that_of_kernels(tmp_path):
    """Of a trace with kernels, ``convert`` writes these below the operators that launched them."""
    (tmp_path / "t.json").write_text(json.dumps(cuda_trace()))
    assert cli.main(["convert", "-q", str(tmp_path / "t.json"), "-o", str(tmp_path / "p.pb.gz")]) == 0
    found = read(tmp_path / "p.pb.gz")
    assert {name: time for name, time in sums_by_name(found, "device").items() if time} == {
        "gemm": 100_000,
        "splitK": 20_000,
        "Memcpy HtoD": 5_000,
    }
    stacks = [stack for stack, _, _ in samples(found)]
    assert ("step", "aten::linear", "aten::addmm", "gemm") in [
        tuple(s for s in stack if s != "cudaLaunchKernel") for stack in stacks
    ]


def test_a_negative_self_time_is_none(tmp_path):
    """A call with labels that overlap has a negative self time, as in torch; speedscope refuses such files."""
    columns = {
        "start": [0, 1, 2],
        "end": [10, 9, 10],
        "name": [1, 2, 3],
        "parent": [-1, 0, 0],
        "kind": [Kind.LABEL] * 3,
    }
    found = written(columns, ["", "call", "a", "b"], tmp_path / "p.pb")
    assert min(value for *_, values in samples(found) for value in values.values()) == 0
    assert found.string_table[found.sample_type[-1].type] == "time"


def test_hostile_names(tmp_path):
    """NUL, lone surrogates, invalid UTF-8 and 10 kB are texts of the profile; each keeps its own calls."""
    names = ["", "a\0b", "\ud800", b"\xff\xfe", "x" * 10_000, "<script>", "\n(1): f"]
    columns = {"start": list(range(6)), "end": list(range(1, 7)), "name": list(range(1, 7)), "kind": [Kind.LABEL] * 6}
    found = written(columns, names, tmp_path / "p.pb")
    assert sum(sums_by_name(found, "calls").values()) == 6
    assert {"a\0b", "x" * 10_000, "<script>"} <= set(found.string_table)


def test_an_empty_profile(tmp_path):
    """Nothing was recorded: the file has types of values and no sample."""
    with otp.profile(operators=False, sampling=False) as prof:
        pass
    prof.export_as(tmp_path / "p.pb")
    found = read(tmp_path / "p.pb")
    assert (len(found.sample), len(found.sample_type)) == (0, 2)


def test_a_stack_without_calls(tmp_path):
    """A sample whose stack is not known has its values and no call."""
    prof = profile_with(taken([5 * MS], [0], stacks=[()]), steps=False)
    prof.export_as(tmp_path / "p.pb")
    assert [stack for stack, _, values in samples(read(tmp_path / "p.pb")) if values["samples"]] == [()]


def test_phases_of_other_threads():
    """An event of another thread, as those of autograd, is in the phase that the loop's thread was in."""
    columns = {
        "start": [10, 12, 30, 13, 32, 45],
        "end": [20, 18, 40, 14, 33, 46],
        "name": [1, 2, 1, 2, 2, 2],
        "parent": [-1, 0, -1, -1, -1, -1],
        "thread": [0, 0, 0, 1, 1, 1],
        "kind": [Kind.PHASE] * 3 + [Kind.OPERATOR] * 3,
        "fwd_thread": [Part.FORWARD, Part.COMPILATION, Part.BACKWARD, 0, 0, 0],
    }
    threads = (RecordedThread(1, 1, 1, "main"), RecordedThread(2, 2, 2, "autograd"))
    info = EventInfo.of(Batch.of(columns, ["", "x", "y"], threads), modules=True, with_flops=False, with_devices=False)
    table = EventTable(info, (), None)
    by_row = dict(zip(info.view.rows.tolist(), table.phases.tolist(), strict=True))
    assert by_row[3] == by_row[1]
    assert by_row[4] == by_row[2] != by_row[3]
    assert by_row[5] == -1


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_varints(values):
    """Columns of numbers are written as single ones are."""
    numbers = np.array(values, dtype=np.int64)
    sizes = varint_sizes(numbers)
    room = np.zeros(int(sizes.sum()), dtype=np.uint8)
    put_varints(room, np.cumsum(sizes) - sizes, numbers, sizes)
    assert room.tobytes() == b"".join(varint(value % 2**64) for value in values)


def test_memory_does_not_grow_with_the_calls(tmp_path):
    """Of calls with equal stacks, the file has one sample: 100,000 calls make a file of under 1 kB."""
    count = 100_000
    start = np.arange(count) * 10
    columns = {"start": start, "end": start + 5, "name": np.ones(count, int)}
    found = written(columns, ["", "op"], tmp_path / "p.pb")
    assert [values["calls"] for _, _, values in samples(found)] == [count]
    assert (tmp_path / "p.pb").stat().st_size < 1000
