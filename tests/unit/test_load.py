"""``otp.load``: a trace file as a profile, from files made by hand: what they say, what they lack, what is wrong in them. Boxes and folders of ranks."""

from __future__ import annotations

import gzip
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_events import cuda_trace, event, kernel, memory, training_trace
from malformed_files import VALUES, bytes_changed
from trace_validator import check_nesting

import otel_torchprof as otp
from otel_torchprof._columns.schema import Flag, Kind, Scope
from otel_torchprof._files.box import BlackBox
from otel_torchprof.parsers import BlackBoxOptions

BASE = 1_790_000_000_000_000_000


@pytest.fixture
def loaded(tmp_path):
    """Loads events as a file of torch's profiler."""

    def load(*events, **members):
        path = tmp_path / "trace.json"
        document = {"baseTimeNanoseconds": BASE, **members, "traceEvents": events}
        path.write_text(json.dumps(document))
        return otp.load(path)

    return load


def figures(prof, **groups):
    """Calls, total and self time of each name, ns."""
    return {
        average.key: (average.count, round(average.cpu_time_total * 1000), round(average.self_cpu_time_total * 1000))
        for average in prof.key_averages(**groups)
    }


def named(each):
    """Name, times and stack of an event."""
    return each.name, each.time_range.start, each.time_range.end, each.stack


def test_averages_of_a_labelled_recording_are_the_same(tmp_path):
    """Averages, events, steps and Chrome trace of a loaded profile are those of the profile that wrote the file, to the nanosecond."""
    with otp.profile(operators=False, with_stack=True, frames=otp.FrameFilter(include=["json"])) as prof:
        for _ in range(3):
            with otp.record_function("outer"), otp.record_function("inner"):
                json.dumps({"a": [1, 2]})
            prof.step()
    prof.export_chrome_trace(tmp_path / "t.json.gz")
    loaded = otp.load(str(tmp_path / "t.json.gz"))
    assert figures(loaded) == figures(prof)
    assert [named(each) for each in loaded.events()] == [named(each) for each in prof.events()]
    assert [step[:3] for step in loaded.steps] == [step[:3] for step in prof.steps]
    assert len(loaded.steps) == 3
    loaded.export_chrome_trace(tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_bytes())
    first = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    assert len(again["traceEvents"]) == len(first["traceEvents"])
    assert again["trace_id"] == first["trace_id"]


def test_parents_are_what_encloses_an_event_on_its_thread(loaded):
    """Self time is the time without the events inside on the same thread, in whatever order the file has them."""
    prof = loaded(
        event("b", 2, 3), event("a", 1, 10.5), event("other", 2, 4, tid=3), event("c", 3, 1), event("b", 6, 2)
    )
    assert figures(prof) == {
        "a": (1, 10_500, 5500),
        "b": (2, 5000, 4000),
        "other": (1, 4000, 4000),
        "c": (1, 1000, 1000),
    }
    assert prof.columns["start"].min() == BASE + 1000
    assert [thread.os_tid for thread in prof.threads] == [2, 3]


def test_pairs_of_begin_and_end_are_events(loaded):
    """Phases B and E of a thread, and b and e of one id, are an event each; ends and begins without the other are counted."""
    begin = {"ph": "B", "name": "a", "pid": 1, "tid": 2, "ts": 1}
    pair = {"cat": "cpu_op", "name": "b", "pid": 1, "tid": 2, "id2": {"local": "7"}}
    prof = loaded(
        begin,
        {**begin, "name": "open", "tid": 9},
        {**pair, "ph": "b", "ts": 3, "args": {"async": True}},
        {**begin, "ph": "E", "ts": 5},
        {**begin, "ph": "E", "ts": 6},
        {**pair, "ph": "e", "ts": 7},
    )
    assert figures(prof) == {"a": (1, 4000, 4000), "b": (1, 4000, 0)}
    assert prof.columns["flags"].tolist() == [0, Flag.ASYNC]
    assert "ends of no slice (1)" in prof.health.notes[0]
    assert "slices without end (1)" in prof.health.notes[0]


def test_categories_are_kinds(loaded):
    """Labels, calls and modules are recognized by category; what the profiler itself did is left out and counted."""
    prof = loaded(
        event("label", 1, 10, cat="user_annotation"),
        event("call", 2, 5, cat="python_function"),
        event("launch", 3, 1, cat="cuda_runtime"),
        event("PyTorch Profiler (0)", 0.5, 20, cat="Trace"),
    )
    assert prof.columns["kind"].tolist() == [Kind.LABEL, Kind.FRAME, Kind.OPERATOR]
    assert prof.columns["scope"].tolist() == [Scope.USER_SCOPE, 0, 0]
    assert prof.events()[2].stack == ["call"]
    assert "slices of the profiler (1)" in prof.health.notes[0]
    assert (prof.health.start_ns, prof.health.stop_ns) == (BASE + 500, BASE + 20_500)


def test_inputs_are_those_of_the_file(loaded):
    """Shapes, types, strides and values are read; lists that the file does not have are not made up."""
    prof = loaded(
        event(
            "aten::addmm",
            1,
            2,
            **{
                "Input Dims": [[2, 3], [], [[4], [5, 6]]],
                "Input type": ["float", "Scalar", "TensorList"],
                "Input Strides": [[1, 2], [], [[1], [6, 1]]],
                "Concrete Inputs": ["", "0.5", ""],
            },
        ),
        event("aten::mm", 4, 2, **{"Input Dims": [[2, 3]], "Input type": ["c10::BFloat16"]}),
    )
    first, second = prof.events()
    assert first.input_shapes == [[2, 3], [], []]
    assert first.structured_input_shapes == [[2, 3], [], [[4], [5, 6]]]
    assert first.structured_input_strides == [[1, 2], [], [[1], [6, 1]]]
    assert first.input_dtypes == ["float", "Scalar", "TensorList"]
    assert first.concrete_inputs == [None, 0.5, None]
    assert (second.input_shapes, second.input_dtypes) == ([[2, 3]], ["c10::BFloat16"])
    assert second.structured_input_strides == [[]]
    assert {str(average.input_shapes) for average in prof.key_averages(group_by_input_shape=True)} == {
        "[[2, 3], [], []]",
        "[[2, 3]]",
    }


def test_memory_belongs_to_the_event_that_was_open(loaded):
    """Allocations count for the innermost event of their thread, and for those around it; with their peaks."""
    prof = loaded(event("a", 1, 10), event("b", 2, 3), memory(3, 100, 100), memory(7, -40, 60), memory(20, 8, 68))
    sums = {
        average.key: (average.cpu_memory_usage, average.self_cpu_memory_usage, average.cpu_memory_peak)
        for average in prof.key_averages()
    }
    assert sums == {"a": (60, -40, 100), "b": (100, 100, 100), "[memory]": (8, 8, 68)}
    assert prof.profile_memory


def test_labels_of_steps_are_steps(loaded):
    """Torch's labels of steps are events and steps; the explanation of a trace without any names the file."""
    prof = loaded(
        event("ProfilerStep#4", 1, 10, cat="user_annotation", **{"External id": 1}),
        event("ProfilerStep#5", 11, 10, cat="user_annotation", **{"External id": 2}),
        event("a", 12, 2),
    )
    assert [(step.number, step.start - BASE, step.end - BASE) for step in prof.steps] == [
        (4, 1000, 11_000),
        (5, 11_000, 21_000),
    ]
    assert figures(prof)["ProfilerStep*"] == (2, 20_000, 18_000)
    with pytest.raises(otp.TorchProfError, match=r"trace\.json' has no steps"):
        loaded(event("a", 12, 2)).explain()


def test_backward_functions_have_the_stack_of_the_forward_one(loaded):
    """Torch's id of a thread follows from the backward functions that name it, and with it their forward operators."""
    prof = loaded(
        event("call", 1, 5, cat="python_function"),
        event("aten::mm", 2, 1, **{"Sequence number": 3, "Fwd thread id": 0}),
        event(
            "autograd::engine::evaluate_function: MmBackward0",
            10,
            5,
            tid=3,
            **{"Sequence number": 3, "Fwd thread id": 1},
        ),
        event("MmBackward0", 11, 3, tid=3, **{"Sequence number": 3, "Fwd thread id": 1}),
    )
    assert [thread.torch_tid for thread in prof.threads] == [1, 0]
    events = {each.name: each for each in prof.events()}
    assert events["MmBackward0"].stack == events["aten::mm"].stack == ["call"]
    assert events["autograd::engine::evaluate_function: MmBackward0"].sequence_nr == 3


def test_what_is_not_read_is_said(loaded, tmp_path):
    """Events without a place in a profile are counted in the health report, dropped ones as the file says, faults with their place."""
    prof = loaded(
        event("a", 1, 1),
        {"ph": "C", "name": "c", "ts": 1, "args": {"v": 1}},
        {"ph": "s", "id": 1, "ts": 1},
        event("bad", "x", 1),
        event("kernel", 5, 1, cat="kernel", device=0, stream=7),
        dropped_events={"budget": 5},
    )
    assert prof.health.dropped == {"budget": 5}
    fault, left_out = prof.health.notes
    assert "not counted: 1; the first: ts is 'x', expected a number up to 2305843009213693, event 4" in fault
    for text in ("counter values (1)", "arrows (1)"):
        assert text in left_out
    assert repr(prof).endswith(f"events from {str(tmp_path / 'trace.json')!r}>")


def test_other_files_are_refused(tmp_path):
    """Other formats and bad limits raise errors with the way out."""
    path = tmp_path / "spans.json"
    path.write_bytes(b"\x7fELF")
    with pytest.raises(otp.TorchProfError, match="expected a Chrome trace, or OTLP"):
        otp.load(path)
    with pytest.raises(otp.TorchProfError, match="No such file"):
        otp.load(tmp_path / "none")
    for limit in (0, -1, "1"):
        with pytest.raises(ValueError, match="memory_limit is"):
            otp.load(path, memory_limit=limit)


def test_call_stacks_of_the_file_are_stacks(loaded):
    """Operators whose call stack is among their arguments, as those of TorchScript, have it where the file has no calls."""
    prof = loaded(
        event("aten::mm", 1, 2, **{"Call stack": "model.py(3): forward;train.py(9): <module>;"}),
        event("aten::mm", 4, 2, **{"Call stack": "model.py(5): loss;train.py(9): <module>;"}),
        event("aten::add", 7, 2),
    )
    assert [each.stack for each in prof.events()] == [
        ["model.py(3): forward", "train.py(9): <module>"],
        ["model.py(5): loss", "train.py(9): <module>"],
        [],
    ]
    assert len(prof.key_averages(group_by_stack_n=1)) == 3


def span(name, ts, dur, parent=None, *, cat="cpu_op", tid=1, **attributes):
    """A span whose id is its time; ``parent``: the time of another one."""
    parent_id = "" if parent is None else f"{parent + 1:016x}"
    ids = {"span_id": f"{ts + 1:016x}", "parent_id": parent_id}
    return event(name, ts, dur, cat=cat, **ids, attributes=attributes) | {"tid": tid}


def test_spans_are_events(loaded):
    """Spans of an instrumentation are events: labels, operators with inputs, phases, steps; not the job, nor a step that had not ended."""
    shapes = {"torch.op.input_shapes": "[[2, 3], []]", "torch.op.input_dtypes": "['float', 'Scalar']"}
    prof = loaded(
        span("torch.job", 0, 100, cat="user_annotation"),
        span("ProfilerStep#2", 1, 50, 0, cat="user_annotation", **{"torch.step.number": 2}),
        span("ProfilerStep#3", 51, 9, 0, cat="user_annotation", **{"torch.step.number": 3, "torch.unfinished": True}),
        span("generate", 2, 30, 1, cat="user_annotation", **{"torch.phase.name": "forward"}),
        span("torch.phase.forward", 3, 20, 2, cat="user_annotation", **{"torch.phase.name": "forward"}),
        span("aten::add", 4, 8, 3, **shapes, **{"torch.op.concrete_inputs": "[None, 0.5]", "error.type": "ValueError"}),
    )
    assert figures(prof) == {
        "ProfilerStep*": (1, 50_000, 20_000),
        "torch.phase.forward": (1, 30_000, 22_000),  # the inner one is a part of the outer one
        "aten::add": (1, 8000, 8000),
    }
    add = prof.events()[-1]
    assert (add.input_shapes, add.input_dtypes) == ([[2, 3], []], ["float", "Scalar"])
    assert add.concrete_inputs == [None, 0.5]
    assert prof.names[prof.columns["error_type"][-1]] == "ValueError"
    assert [step.number for step in prof.steps] == [2]
    assert prof.health.notes == ("not in the profile: spans of the job (1), steps without end (1)",)


def test_spans_on_the_first_track_only(loaded):
    """A file with one track, whose column is a view of one number, can be read as any other."""
    prof = loaded(span("a", 0, 9, **{"thread.id": 1}), span("b", 1, 5, 0, **{"thread.id": 1}))
    assert figures(prof) == {"a": (1, 9000, 4000), "b": (1, 5000, 5000)}


def test_spans_that_cross(loaded):
    """Spans of tasks that take turns on a thread, which the file has on tracks of their own, have the parents that it says."""
    thread = {"thread.id": 140737}
    prof = loaded(
        span("first", 0, 100, **thread),
        span("second", 50, 100, tid=2, **thread),
        span("aten::mul", 60, 20, 0, tid=2, **thread),
        span("aten::add", 120, 7, 50, **thread),
    )
    assert figures(prof) == {
        "first": (1, 100_000, 80_000),
        "second": (1, 100_000, 93_000),
        "aten::mul": (1, 20_000, 20_000),
        "aten::add": (1, 7000, 7000),
    }
    assert len(prof.threads) == 1


@pytest.mark.parametrize("text", ['{"traceEvents": []}', "[]"])
def test_a_trace_without_events_is_an_empty_profile(tmp_path, text):
    """A file that a recording without events wrote is a profile without events."""
    (tmp_path / "t.json").write_text(text)
    prof = otp.load(tmp_path / "t.json")
    assert (len(prof.events()), len(prof.key_averages()), prof.table()) == (0, 0, "")
    assert prof.to_pandas().empty
    prof.export_chrome_trace(tmp_path / "again.json")


def test_kernels_are_events_of_their_device(loaded):
    """Kernels and copies are rows with their device and stream; their time is that of the operator that launched them, and of what is around it."""
    prof = loaded(*cuda_trace())
    sums = {
        (average.key, average.device_type.name): (
            average.count,
            round(average.self_cpu_time_total),
            round(average.self_device_time_total),
            round(average.device_time_total),
        )
        for average in prof.key_averages()
    }
    assert sums == {
        ("step", "CPU"): (1, 10, 0, 125),
        ("aten::linear", "CPU"): (1, 5, 0, 120),
        ("aten::addmm", "CPU"): (1, 11, 120, 120),
        ("cudaLaunchKernel", "CPU"): (1, 4, 0, 0),
        ("aten::copy_", "CPU"): (1, 8, 5, 5),
        ("cudaMemcpyAsync", "CPU"): (1, 2, 0, 0),
        ("gemm", "CUDA"): (1, 0, 100, 100),
        ("splitK", "CUDA"): (1, 0, 20, 20),
        ("Memcpy HtoD", "CUDA"): (1, 0, 5, 5),
        ("step", "CUDA"): (1, 0, 125, 125),
    }
    events = {(each.name, each.device_type.name): each for each in prof.events()}
    copy = events["Memcpy HtoD", "CUDA"]
    assert (copy.device_index, copy.device_resource_id, copy.activity_type) == (0, 8, "gpu_memcpy")
    assert copy.time_range.elapsed_us() == 5
    assert events["step", "CUDA"].is_user_annotation
    assert [(each.name, each.duration) for each in events["aten::addmm", "CPU"].kernels] == [
        ("gemm", 100),
        ("splitK", 20),
    ]
    assert prof.work["bytes"].tolist() == [-1, -1, -1, 4096]
    assert prof.use_device == "cuda"
    assert prof.health.devices == "on"
    assert prof.health.notes == ("not in the profile: waits and ranges of devices (1)",)
    assert "Self CUDA time total: 125.000us" in prof.key_averages().table()
    assert "Self CUDA time total: 125.000us" in prof.table()


def test_exported_kernels_can_be_loaded_again(loaded, tmp_path):
    """A trace with kernels that is written and read again has the same averages, devices and streams."""
    prof = loaded(*cuda_trace())
    prof.export_chrome_trace(tmp_path / "again.json")
    check_nesting(json.loads((tmp_path / "again.json").read_bytes())["traceEvents"])
    again = otp.load(tmp_path / "again.json")
    names = ("key", "count", "self_cpu_time_total", "device_time_total", "self_device_time_total")
    assert [[getattr(row, name) for name in names] for row in again.key_averages()] == [
        [getattr(row, name) for name in names] for row in prof.key_averages()
    ]
    for name in ("start", "duration", "stream", "device_index", "bytes", "correlation", "flags"):
        assert again.work[name].tolist() == prof.work[name].tolist()


def test_sums_over_columns_and_objects_agree_on_kernels(loaded):
    """Averages from event objects, as after a change of one of them, are those from the columns."""
    events, changed = loaded(*cuda_trace()).events(), loaded(*cuda_trace()).events()
    changed[0].node_id = changed[0].node_id
    names = ("key", "count", "cpu_time_total", "self_cpu_time_total", "device_time_total", "self_device_time_total")
    rows = [
        sorted([*(getattr(row, name) for name in names), str(row.device_type)] for row in each.key_averages())
        for each in (events, changed)
    ]
    assert rows[0] == rows[1]
    assert events.to_pandas()["self_device_time_total"].sum() == 2 * 125 + 125


def test_without_ids_of_operators_calls_of_the_runtime_launch_kernels(loaded):
    """In a file whose kernels have only the number that they share with a call, the call and what is around it have their time."""
    trace = [each for each in cuda_trace() if each.get("cat") != "gpu_user_annotation"]
    for each in trace:
        each.get("args", {}).pop("External id", None)
    times = {each.key: (each.self_device_time_total, each.device_time_total) for each in loaded(*trace).key_averages()}
    assert times["cudaLaunchKernel"] == (120, 120)
    assert times["aten::addmm"] == times["aten::linear"] == (0, 120)


def test_timed_events_have_their_device_times(loaded):
    """The device times that a profile of this package wrote are those of the loaded one."""
    timed = kernel("a", 3, 9, 5, 0, cat="gpu_user_annotation")
    timed["args"] = {"External id": 5, "device": 0, "stream id": 7}
    prof = loaded(
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        event("around", 0, 20, **{"External id": 4}),
        event("a", 1, 2, **{"External id": 5}),
        timed,
    )
    assert {column: values.tolist() for column, values in prof.devices.items()} == {
        "event": [2],
        "start": [BASE + 3000],
        "duration": [9000],
        "stream": [7],
        "device_type": [1],
        "device_index": [0],
    }
    times = {each.key: (each.self_device_time_total, each.device_time_total) for each in prof.key_averages()}
    assert times == {"around": (0, 9), "a": (9, 9)}


def changed(seed: int) -> bytes:
    """A trace of torch's profiler with other values, or with other bytes."""
    number, trace = random.Random(seed), training_trace()
    if number.random() < 0.5:
        return bytes_changed(number, json.dumps({"baseTimeNanoseconds": BASE, "traceEvents": trace}).encode())[0]
    for _ in range(number.randint(1, 4)):
        one = number.choice(trace)
        target = one["args"] if number.random() < 0.5 and isinstance(one.get("args"), dict) and one["args"] else one
        target[number.choice(list(target))] = number.choice(VALUES)
    members = {number.choice(("baseTimeNanoseconds", "python_threads", "dropped_events", "a")): number.choice(VALUES)}
    return json.dumps({**members, "traceEvents": trace}).encode()


def read_everything(path):
    """Reads a file in all ways that a profile has; returns the error if it was refused."""
    try:
        prof = otp.load(path)
    except otp.TorchProfError as error:
        return str(error)
    events = prof.events()
    for groups in ({}, {"group_by_input_shape": True}, {"group_by_stack_n": 3}):
        assert sum(row.count for row in prof.key_averages(**groups)) == len(events)
    assert prof.key_averages().table() or not len(events)
    assert len(prof.to_pandas()) == len(events)
    prof.export_chrome_trace(path.with_name("again.json"))
    assert all(repr(each) for each in (*events[:50], prof.steps, prof.health, prof.total_average(), prof.spans()))
    return None


@given(st.integers(0, 1 << 40))
def test_whatever_the_file(tmp_path_factory, seed):
    """Whatever values and bytes a trace has, it is refused with its name, or it is a profile of which everything can be read."""
    path = tmp_path_factory.mktemp("changed") / "t.json"
    path.write_bytes(changed(seed))
    error = read_everything(path)
    assert error is None or repr(str(path)) in error


@pytest.fixture
def image(tmp_path):
    """The bytes of a box with three labels that have ended, inside of one that has not."""
    box = BlackBox(BlackBoxOptions("ops", str(tmp_path / "boxes"), 1 << 20), {"rank": 3})
    box.start()
    with otp.record_function("open"):
        for _ in range(3):
            with otp.record_function("ended"):
                pass
        yield box.path.read_bytes()
    box.stop()


@pytest.fixture
def loaded_box(tmp_path):
    """Loads bytes."""

    def load(content, **options):
        (tmp_path / "t.otpbox").write_bytes(content)
        return otp.load(tmp_path / "t.otpbox", **options)

    return load


def labels(prof):
    """Counts of the labels: operators of torch's library may be in the box too."""
    return {row.key: row.count for row in prof.key_averages() if not row.key.startswith("aten::")}


def test_a_box_is_a_profile(image, loaded_box, tmp_path):
    """Events of a box have averages, spans and a Chrome trace; what was open at the end is unfinished, and the process is the resource."""
    prof = loaded_box(image)
    assert labels(prof) == {"open": 1, "ended": 3}
    batch = prof.columns
    unfinished = [prof.names[name] for name in batch["name"][batch["flags"] & Flag.UNFINISHED != 0]]
    assert unfinished == ["open"]
    assert prof.health.labels == "on"
    assert prof.health.stop_ns >= batch["end"].max()
    assert prof.spans()[0].resource.attributes["torch.distributed.rank"] == 3
    for name, format_name in (("t.json", "chrome"), ("t.otlp", "otlp")):
        prof.export_as(tmp_path / name, format_name)
        assert labels(otp.load(tmp_path / name)) == {"open": 1, "ended": 3}


def test_a_part_of_a_box(image, loaded_box):
    """A box that is cut off is a profile of what is whole in it; without its head, or above the limit, it is refused."""
    half = loaded_box(image[: len(image) // 2])
    assert labels(half).keys() <= {"open", "ended"}
    with pytest.raises(otp.TorchProfError, match=r"cannot read .*t\.otpbox'"):
        loaded_box(image[:100])
    with pytest.raises(otp.TorchProfError, match="has 1,048,576 bytes, more than the limit of 1,000"):
        loaded_box(image, memory_limit=1000)


@pytest.fixture
def write(tmp_path):
    """Writes a trace of torch's profiler."""

    def write(name, rank, *events):
        members = {} if rank is None else {"distributedInfo": {"rank": rank}}
        (tmp_path / name).write_text(json.dumps({**members, "traceEvents": events}))
        return tmp_path / name

    return write


def test_a_folder_is_its_traces(write, tmp_path):
    """Files of traces are profiles in the order of their ranks, whatever their formats; other files are not read."""
    for rank in (10, 2):
        write(f"t{rank}.json", rank, *[event(f"aten::op{rank}", ts, 1) for ts in range(rank)])
    (tmp_path / "notes.txt").write_text("no trace")
    with otp.profile(operators=False) as prof, otp.record_function("label"):
        pass
    prof.export_otlp(tmp_path / "own.otlp.gz", resource=otp_resource(1))
    ranks = otp.load_ranks(tmp_path)
    assert list(ranks) == [1, 2, 10]
    assert [len(each.events()) for each in ranks.values()] == [1, 2, 10]
    assert repr(ranks) == "<profiles of ranks 1, 2, 10>"
    assert repr(otp.load_ranks([tmp_path / "t2.json"])) == "<profiles of rank 2>"


def otp_resource(rank):
    from opentelemetry.sdk.resources import Resource

    return Resource({"torch.distributed.rank": rank})


def test_files_without_an_own_rank_are_refused(write, tmp_path):
    """Files that do not say their rank, two of one rank, and folders without traces raise errors that name them."""
    first, same, none = write("a.json", 0), write("b.json", 0), write("c.json", None)
    with pytest.raises(otp.TorchProfError, match=r"b\.json' is of rank 0, as .*a\.json'"):
        otp.load_ranks([first, same])
    with pytest.raises(otp.TorchProfError, match=r"c\.json' does not say of which rank it is"):
        otp.load_ranks([first, none])
    with pytest.raises(otp.TorchProfError, match="is a folder: load_ranks reads"):
        otp.load(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(otp.TorchProfError, match="no traces in"):
        otp.load_ranks(tmp_path / "empty")
    with pytest.raises(otp.TorchProfError, match=r"a\.json' is no folder"):
        otp.load_ranks(first)
    with pytest.raises(ValueError, match="memory_limit is 0"):
        otp.load_ranks([first], memory_limit=0)


def test_the_limit_is_that_of_all_files(write):
    """Each file gets its share of the memory; what is above it is reported as by ``load``."""
    paths = [write(f"{rank}.json", rank, *[event("a", ts, 1) for ts in range(70_000)]) for rank in range(2)]
    notes = [each.health.notes for each in otp.load_ranks(paths, memory_limit=2 << 20).values()]
    assert all("more than the limit of 1 MiB" in note[0] for note in notes)
