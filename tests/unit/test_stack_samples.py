"""Samples of Python stacks: on which span they are, in files and back."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from checked_json import checked
from merged_files import BASE, BEGIN, Meetings, WrongClock
from policy_jobs import job
from sampled_profiles import DEEP, LOG, MAIN, MS, STACKS, batch, profile_with, sampled_drains, samples, written

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._columns.batch import OpenEvents, RecordedThread
from otel_torchprof._columns.samples import Call, kept_calls
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._encode.chrome_samples import sample_pieces
from otel_torchprof._encode.sampled import MOST_TEXT, LiveSamples
from otel_torchprof._encode.spans import drained_spans
from otel_torchprof._export.formats import format_of
from otel_torchprof._files import stack_samples
from otel_torchprof._files.event_columns import events_of_spans
from otel_torchprof._files.merge import merge
from otel_torchprof._files.reading import read_events
from otel_torchprof._files.records import MalformedError
from otel_torchprof._files.stack_samples import LONGEST_TEXT, SpanSamples, parsed_chunk, parsed_samples
from otel_torchprof._files.trace_events import joined
from otel_torchprof._model.limits import most_bytes
from otel_torchprof._model.live import placed_recording
from otel_torchprof._model.live_table import Flows
from otel_torchprof._model.step_spans import RecordedStep
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._record.samples_source import StackSamples

KEY = "torch.samples"
TAKEN = samples([5 * MS, 12 * MS, 29 * MS, 31 * MS, 59 * MS], [0, 1, 0, 2, 1])


def placed(recorded, *steps):
    ids = iter(range(1, 1000))
    return placed_recording(recorded, steps, new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids))


def texts(recorded, *steps):
    """What each span of a table has, in its order, as JSON; None for none."""
    table = drained_spans(*placed(recorded, *steps), Flows())
    column = next((column for column in table.attributes if column.key == KEY), None)
    found = {} if column is None else dict(zip(column.rows.tolist(), column.values.tolist(), strict=True))
    return [json.loads(table.names[found[row]]) if row in found else None for row in range(len(table))]


def test_a_step_has_the_samples_of_its_thread_in_its_time():
    """A sample is on the step in which it was taken, if on its thread; steps without any, and events, have nothing."""
    taken = samples([3_000_000, 4_000_000, 9_000_000, 25_000_000], [0, 1, 1, 0], [0, 1, 0, 0])
    recorded = batch(taken, (2_000_000, 5_000_000, 0), (2_000_000, 5_000_000, 1))
    steps = [RecordedStep(number, number * 10_000_000, (number + 1) * 10_000_000, 70) for number in range(3)]
    first, second, third, *events = texts(recorded, *steps)
    log, adam = ["train.py:5 log_metrics", "train.py:22 main"], [str(call) for call in STACKS[1]]
    assert first == {"stacks": [log, adam], "samples": [[0.003, 0.01, 0], [0.009, 0.01, 1]]}
    assert (second, third) == (None, {"stacks": [log], "samples": [[0.005, 0.01, 0]]})
    assert events == [None, None]


def test_a_profile_without_steps_has_all_samples():
    """The root of a profile without steps, which is of no thread, has those of all threads."""
    root, event = texts(
        batch(samples([3, 4], [0, 1], [0, 1]), (2, 5, 0)), RecordedStep(-1, 0, 10, name="torch.profile")
    )
    assert [index for *_, index in root["samples"]] == [0, 1]
    assert event is None


def test_a_long_step_keeps_its_time_in_fewer_samples():
    """Of more samples than fit, some stand for their neighbours, and stacks lose outer calls: the text is bounded, the time stays."""
    deep = [tuple(Call(f"package/module_{n}.py", line, "function") for line in range(100)) for n in range(20)]
    times = range(0, 6_000 * 10 * MS, 10 * MS)
    taken = samples(times, [n % 20 for n in range(6_000)], stacks=deep)
    [root] = texts(batch(taken), RecordedStep(0, 0, 61_000 * MS, 70))
    assert len(json.dumps(root, separators=(",", ":"))) <= MOST_TEXT
    assert sum(duration for _, duration, _ in root["samples"]) == pytest.approx(60)
    assert {len(stack) for stack in root["stacks"]} == {16}
    assert len(root["stacks"]) > 10
    assert len(root["samples"]) >= 64


def test_long_texts_of_samples_count_on_their_span_only():
    """The bound by which sizes of traces need not be computed counts the text of a step's samples once, not for each span."""
    deep = [tuple(Call(f"package/module_{n}.py", line, "function") for line in range(64)) for n in range(20)]
    taken = samples(range(0, 400 * MS, 10 * MS), [n % 20 for n in range(40)], stacks=deep)
    recorded = batch(taken, *((at, at + MS // 2, 0) for at in range(0, 300 * MS, MS)))
    table = drained_spans(*placed(recorded, RecordedStep(0, 0, 500 * MS, 70)), Flows())
    assert sum(column.key == KEY for column in table.attributes) == 1
    assert most_bytes(table, len(table)) < len(table) * 400 + MOST_TEXT


def test_calls_beyond_64_are_cut():
    """A stack has its 48 innermost calls, the 8 nearest of the program around them, and its 8 outermost ones."""
    calls = [Call("torch/a.py" if line < 60 else "a.py", line, "f") for line in range(100)]
    [root] = texts(batch(samples([5], [0], stacks=[tuple(calls)])), RecordedStep(0, 0, 10, 70))
    assert root["stacks"] == [[str(calls[line]) for line in (*range(48), *range(60, 68), *range(92, 100))]]


@pytest.mark.parametrize("most", [64, 32, 16])
def test_the_line_that_a_compiler_was_called_from_is_kept(most):
    """However deep a compiler is, and whatever has started the program, the program's nearest lines are in a stack that was cut."""
    compiler = [Call("torch/_dynamo/a.py", line, "f") for line in range(80)]
    program = [Call("train.py", line, "g") for line in (7, 9)]
    launcher = [Call("runpy.py", line, "h") for line in range(20)]
    kept = kept_calls((*compiler, *program, *launcher), most)
    assert len(kept) == most
    assert [call for call in kept if call in program] == program


def test_outer_calls_are_written_once():
    """Outer calls that a stack shares with the one before are a number, and readers give them back."""
    outer = [Call("run.py", line, "f") for line in range(5)]
    stacks = [(LOG, *outer), (MAIN, LOG, *outer), (DEEP, MAIN), tuple(outer)]
    recorded = batch(samples([1, 2, 3, 4], [0, 1, 2, 3], stacks=stacks))
    [root] = texts(recorded, RecordedStep(0, 0, 10, 70))
    texts_of = [[str(call) for call in stack] for stack in stacks]
    assert root["stacks"] == [texts_of[0], [str(MAIN), 6], texts_of[2], texts_of[3]]
    assert parsed_samples(json.dumps(root), KEY).stacks == stacks


def test_one_stack_of_huge_names_is_left_out():
    """A single sample that does not fit is no attribute, and no endless search for one that fits."""
    stack = tuple(Call("p" * 4_000, line, "f") for line in range(64))
    assert texts(batch(samples([5], [0], stacks=[stack])), RecordedStep(0, 0, 10, 70)) == [None]


@pytest.mark.parametrize("hidden", ["code.file.path", "code.function.name", KEY])
def test_hidden_names_of_code_are_in_no_stack(monkeypatch, hidden):
    """Where files or functions are hidden, spans have no stacks."""
    monkeypatch.setenv("OTEL_TORCHPROF_HIDDEN_ATTRIBUTES", hidden)
    assert texts(batch(samples([5], [0])), RecordedStep(0, 0, 10, 70)) == [None]


@pytest.mark.parametrize("hidden", ["code.file.path", "code.function.name", KEY])
def test_hidden_names_of_code_are_in_no_chunk(monkeypatch, tmp_path, hidden):
    """Where files, functions or samples are hidden, a Chrome trace has no samples, and none are taken."""
    monkeypatch.setenv("OTEL_TORCHPROF_HIDDEN_ATTRIBUTES", hidden)
    profile_with(TAKEN).export_chrome_trace(tmp_path / "trace.json")
    assert chunks_of(tmp_path / "trace.json") == []
    source = StackSamples(100.0, all_threads=True, is_live=True)
    source.start(None)
    assert source.state == f"off: OTEL_TORCHPROF_HIDDEN_ATTRIBUTES has {hidden}"


# ---- live ----


def test_samples_wait_for_the_end_of_their_step():
    """Samples that come with an earlier drain than the end of their step are kept; those of a step that has ended are not kept."""
    live = LiveSamples()
    one, spans = placed(live.joined(batch(samples([5, 25], [0, 1]))), RecordedStep(0, 0, 10, 70))
    live.keep(one, spans, 20)
    two = live.joined(batch(samples([27], [2]), (20, 26, 0)))
    assert two.samples.time.tolist() == [25, 27]
    live.keep(*placed(two, RecordedStep(1, 20, 30, 70)), 30)
    empty = batch(None)
    assert live.joined(empty) is empty


def test_waiting_samples_keep_their_thread():
    """Batches number their threads anew: a waiting sample stays with its thread, also where the next batch has not got it."""
    live = LiveSamples()
    live.keep(*placed(batch(samples([5, 6], [0, 0], [0, 1])), RecordedStep(0, 0, 1, 70)), 0)
    other = batch(None)
    for threads in (other.threads[::-1], other.threads[1:], ()):
        whole = live.joined(replace(other, threads=threads))
        assert [whole.threads[thread].ident for thread in whole.samples.thread.tolist()] == [70, 80]


def test_waiting_samples_are_bounded():
    """Samples that no step takes are dropped, the oldest first."""
    live = LiveSamples()
    live.keep(*placed(batch(samples(range(70_000), [0] * 70_000)), RecordedStep(0, 80_000, 80_001, 70)), 0)
    assert live.joined(batch(None)).samples.time[[0, -1]].tolist() == [70_000 - 65_536, 69_999]


def test_samples_of_idle_threads_are_not_kept():
    """Without a step that runs, only samples inside an event that is open on their thread wait: no other can find its span."""
    live = LiveSamples()
    one, spans = placed(batch(samples([5, 7, 8], [0, 1, 2], [1, 1, 0])), RecordedStep(0, 0, 1, 70))
    opens = OpenEvents(start=np.array([6], np.int64), thread=np.array([1], np.uint32))
    one = one._replace(batch=replace(one.batch, opens=opens))
    live.keep(one, spans, NEVER)
    assert live.joined(batch(None)).samples.time.tolist() == [7]
    live.keep(one, spans, 8)
    assert live.joined(batch(None)).samples.time.tolist() == [7, 8]


def test_live_steps_have_their_samples():
    """While a program runs, samples that one drain brings are on the steps that end in it and in a later one."""
    with job() as found:
        given = sampled_drains(found.processor)
        found.step("first")
        found.step("second")
        given.append(now_ns())
        found.step("third")
        with otp.record_function("half"):
            pass
        given.append(now_ns())
        found.drain()
        found.step("fourth")
        spans = found.spans()
    numbers = {span.attributes["torch.step.number"]: span for span in spans if KEY in span.attributes}
    assert sorted(numbers) == [2, 3]
    stack = [[str(LOG), str(MAIN)]]
    assert all(json.loads(span.attributes[KEY])["stacks"] == stack for span in numbers.values())


# ---- files ----


@pytest.mark.parametrize("name", ["trace.otlp", "trace.jsonl", "trace.jsonl.gz"])
@pytest.mark.parametrize("has_steps", [True, False])
def test_otlp_there_and_back(tmp_path, name, has_steps):
    """Files of OTLP have all samples, rounded to a microsecond, for readers of events and for load, and so has a file that a loaded one writes."""
    path, again = str(tmp_path / name), str(tmp_path / f"again-{name}")
    prof = profile_with(TAKEN, steps=has_steps)
    prof.export_otlp(path)
    loaded = otp.load(path)
    loaded.export_otlp(again)
    expected = written(prof._batch().samples)
    for found in (
        events_of_spans(prof.spans()).samples,
        read_events([path]).samples,
        loaded._batch().samples,
        read_events([again]).samples,
    ):
        assert written(found) == expected
    threads = [loaded.threads[number].ident for number in loaded._batch().samples.thread.tolist()]
    assert threads == [70] * 5


def test_events_of_several_files_have_the_samples_of_all(tmp_path):
    """Samples of joined events are those of all parts, by time, each on its own track."""
    parts = []
    for number, shift in enumerate((10**18, 10**18 + 15 * MS)):
        prof = profile_with(TAKEN, start=shift)
        prof.export_otlp(tmp_path / f"{number}.otlp")
        parts.append(read_events([str(tmp_path / f"{number}.otlp")]))
    parts[1] = replace(parts[1], tracks=[("other", thread) for _, thread in parts[1].tracks])
    whole = joined(parts)
    assert written(whole.samples) == sorted(written(parts[0].samples) + written(parts[1].samples), key=lambda s: s[0])
    processes = {whole.tracks[track][0] for track in whole.samples.thread.tolist()}
    assert processes == {parts[0].tracks[0][0], "other"}
    assert joined([replace(part, samples=None) for part in parts]).samples is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "a JSON object"),
        ("[]", "an object"),
        ("{}", "a list"),
        ('{"stacks":[],"samples":{}}', "a list"),
        ('{"stacks":[["a.py"]],"samples":[]}', "file:line function"),
        ('{"stacks":[[[]]],"samples":[]}', "a text"),
        ('{"stacks":[[1]],"samples":[]}', "at most 0 calls"),
        ('{"stacks":[["a.py:1 f"],[-1]],"samples":[]}', "at most 1 calls"),
        ('{"stacks":[["a.py:1 f"]],"samples":[[0,1]]}', "a list of time, duration, stack"),
        ('{"stacks":[["a.py:1 f"]],"samples":[[0,1,1]]}', "one of 1 stacks"),
        ('{"stacks":[["a.py:1 f"]],"samples":[[0,1,-1]]}', "one of 1 stacks"),
        ('{"stacks":[["a.py:1 f"]],"samples":[[0,1,true]]}', "one of 1 stacks"),
        ('{"stacks":[["a.py:1 f"]],"samples":[[-1,1,0]]}', "times from 0 on"),
        ('{"stacks":[["a.py:1 f"]],"samples":[[0,NaN,0]]}', "a number"),
        ('{"stacks":[["a.py:1 f"]],"samples":[[1e12,1,0]]}', "at most"),
        ('{"stacks":[["a.py:1 f"]],"samples":[["x",1,0]]}', "a number"),
        ("[" * 30_000, "a JSON object"),
        (" " * (LONGEST_TEXT + 1), "a JSON object"),
        (5, "a text"),
    ],
)
def test_malformed_samples(text, complaint):
    """Anything else than the format is an error that says what was expected."""
    with pytest.raises(MalformedError, match=complaint):
        parsed_samples(text, KEY)


def test_a_span_with_samples_that_are_cut_off_counts(tmp_path):
    """A step whose samples a limit has cut off is a step like any other; the message names the first, with its place."""
    path = tmp_path / "trace.jsonl"
    profile_with(TAKEN).export_otlp(path)
    text = path.read_text()
    assert text.count('"samples\\":[[') == 2
    path.write_text(text.replace('"samples\\":[[0.00', '"samples\\":[[', 1).replace("[[5", "[[[5", 1))
    events = read_events([str(path)])
    assert events.steps().sum() == 2
    assert len(written(events.samples)) < 5
    [problem] = events.problems
    assert "not counted: samples of 1; the first: " in problem
    assert "event 1, at byte" in problem
    loaded = otp.load(path)
    assert len(loaded.steps) == 2
    assert any("samples of 1" in note for note in loaded.health.notes)


def test_spans_whose_samples_a_limit_has_cut_off(monkeypatch):
    """With a limit on the length of attributes, spans in memory have events without samples, and no error."""
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "50")
    events = events_of_spans(profile_with(TAKEN).spans())
    assert events.samples is None
    assert events.steps().sum() == 2


def spans_file(path, *spans):
    """A file of OTLP with spans of 10 ms, one after another, each a name and a thread or None; steps have a sample each."""
    written_spans = []
    for number, (name, thread) in enumerate(spans):
        given = {"torch.step.number": number, "thread.id": thread} if name == "torch.step" else {"thread.id": thread}
        attributes = [{"key": key, "value": {"intValue": value}} for key, value in given.items() if value is not None]
        text = json.dumps({"stacks": [[f"{thread}.py:5 log"]], "samples": [[0.001, 0.01, 0]]})
        attributes += [{"key": KEY, "value": {"stringValue": text}}] if name.startswith("torch.") else []
        begin = 10**18 + number * 10 * MS
        times = {"startTimeUnixNano": str(begin), "endTimeUnixNano": str(begin + 10 * MS)}
        ids = {"traceId": f"{number + 1:032x}", "spanId": f"{number + 1:016x}"}
        written_spans.append({**ids, **times, "name": name, "attributes": attributes})
    scope = {"scope": {"name": "otel_torchprof"}, "spans": written_spans}
    path.write_text(json.dumps({"resourceSpans": [{"resource": {}, "scopeSpans": [scope]}]}) + "\n")
    return path


@pytest.mark.parametrize("others", [(), [("work", 999)]])
def test_threads_that_only_samples_name(tmp_path, others):
    """Threads of steps with samples are threads of a loaded file and of what it writes, also if no event is on them."""
    found = otp.load(spans_file(tmp_path / "a.jsonl", ("torch.step", 111), ("torch.step", 112), *others))
    found.export_otlp(tmp_path / "b.otlp")
    found.export_chrome_trace(tmp_path / "b.json")
    for loaded in (found, otp.load(tmp_path / "b.otlp"), otp.load(tmp_path / "b.json")):
        taken = loaded._batch().samples
        threads = [loaded.threads[thread].ident for thread in taken.thread.tolist()]
        assert [(stack[0].file, thread) for (_, _, stack), thread in zip(written(taken), threads, strict=True)] == [
            ("111.py", 111),
            ("112.py", 112),
        ]
        assert not loaded.is_partial


@pytest.mark.parametrize(
    "spans", [[("torch.step", None)], [("torch.step", None), ("work", 999)], [("torch.profile", None)]]
)
def test_samples_without_a_thread(tmp_path, spans):
    """Samples of a step without a thread, or of a profile without any, are left out with a note, and the file is converted."""
    loaded = otp.load(spans_file(tmp_path / "a.jsonl", *spans))
    assert loaded._batch().samples is None
    assert "not counted: samples of spans without thread.id: 1" in loaded.health.notes[0]
    loaded.export_chrome_trace(tmp_path / "b.json")
    loaded.export_otlp(tmp_path / "b.otlp")
    assert otp.load(tmp_path / "b.otlp")._batch().samples is None


def test_a_short_text_is_no_large_stack():
    """Equal stacks are one, stacks without samples are none, and those of a short text that stand for too many calls are an error."""
    deep = [f"a.py:{line} f" for line in range(64)]

    def text(stacks, used):
        return json.dumps({"stacks": [deep, *stacks], "samples": [[0, 1, index] for index in used]})

    found = parsed_samples(text([[64]] * 1_023, range(1_024)), KEY)
    assert (len(found.stacks), set(found.indices)) == (1, {0})
    others = [[f"b:{line} g", 63] for line in range(1_000)]
    found = parsed_samples(text(others, [1_000, 3, 3]), KEY)
    assert ([found.stacks[index][0].line for index in found.indices], len(found.stacks)) == ([999, 2, 2], 2)
    assert len(parsed_samples(text(others, range(512)), KEY).stacks) == 512
    with pytest.raises(MalformedError, match="at most 32,768 calls in all"):
        parsed_samples(text(others, range(513)), KEY)


def test_calls_of_a_file_are_bounded(monkeypatch):
    """Samples with which the different stacks of a file have too many calls are left out, each alone; equal stacks count once."""
    monkeypatch.setattr(stack_samples, "_MOST_IN_FILE", 10)
    few, many = [(LOG, MAIN)], [(MAIN,) * 9]
    given = [SpanSamples([1], [1], [0], stacks) for stacks in (few, few, many, few)]
    error = MalformedError("of the file")
    found = stack_samples.within_room([*given, error], KEY)
    assert [type(value) for value in found] == [*[SpanSamples] * 2, MalformedError, SpanSamples, MalformedError]
    assert "at most 10 calls in all" in str(found[2])
    assert found[1].stacks[0] is found[0].stacks[0]


# ---- Chrome JSON of profiles ----


def chunks_of(path):
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "P"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("has_steps", [True, False])
def test_chrome_there_and_back(tmp_path, name, has_steps):
    """A profile's Chrome trace has all samples on the tracks of their threads, for readers of events and for load, and what a loaded one writes too."""
    path, again = tmp_path / name, tmp_path / f"again-{name}"
    taken = samples([5 * MS, 12 * MS, 12 * MS + 1_000, 31 * MS, 59 * MS], [0, 1, 0, 2, 1], [0, 0, 1, 0, 1])
    prof = profile_with(taken, steps=has_steps)
    prof.export_chrome_trace(path)
    loaded = otp.load(path)
    loaded.export_chrome_trace(again)
    expected = written(prof._batch().samples)
    for found in (loaded, otp.load(again)):
        assert written(found._batch().samples) == expected
        assert [found.threads[thread].os_tid for thread in found._batch().samples.thread.tolist()] == [7, 7, 8, 7, 8]
        assert not any("marks, samples" in note for note in found.health.notes)
    events = read_events([str(path)])
    assert [(time - events.samples.time.item(0) // 1000, *rest) for time, *rest in written(events.samples)] == [
        (time - expected[0][0], *rest) for time, *rest in expected
    ]
    assert [events.tracks[track][1] for track in events.samples.thread.tolist()] == [7, 7, 8, 7, 8]
    assert not events.problems
    assert "marks, samples and dumps" not in events.left_out


def test_a_sampled_thread_without_events(tmp_path):
    """A thread that only samples know stays a thread of its own in a Chrome trace that is loaded."""
    prof = profile_with(samples([MS], [0], [1]))
    recorded = prof._batch()
    prof._segments.batch = lambda: replace(batch(recorded.samples, (10**18, 10**18 + MS, 0)))
    prof.export_chrome_trace(tmp_path / "trace.json")
    found = otp.load(tmp_path / "trace.json")
    assert found.threads[found._batch().samples.thread.item(0)].os_tid == 8


def test_chunks_are_small(tmp_path):
    """Many samples of deep stacks are chunks that readers take, each with frames of its own; nothing of them is lost."""
    deep = [tuple(Call(f"{'f' * 90}{n}.py", line, "function") for line in range(64)) for n in range(100)]
    taken = samples(range(0, 300 * MS, MS), [n % 100 for n in range(300)], stacks=deep)
    prof = profile_with(taken)
    prof.export_chrome_trace(tmp_path / "trace.json")
    chunks = chunks_of(tmp_path / "trace.json")
    assert len(chunks) > 6
    assert max(len(json.dumps(chunk)) for chunk in chunks) < 1 << 20
    assert written(otp.load(tmp_path / "trace.json")._batch().samples) == written(prof._batch().samples)


def test_perfettos_form(tmp_path):
    """The events are those of V8's sampling profiler, as Perfetto reads them; a function is named as Kineto names its call."""
    prof = profile_with(samples([5 * MS, 8 * MS], [0, 0]))
    prof.export_chrome_trace(tmp_path / "trace.json")
    profile, chunk = chunks_of(tmp_path / "trace.json")
    assert (profile["name"], chunk["name"]) == ("Profile", "ProfileChunk")
    assert profile["id"] == chunk["id"]
    assert profile["args"]["data"]["startTime"] == profile["ts"] == chunk["ts"]
    data = chunk["args"]["data"]
    nodes = [
        (node["id"], node.get("parent"), node["callFrame"]["functionName"]) for node in data["cpuProfile"]["nodes"]
    ]
    assert nodes == [(1, None, "train.py(22): main"), (2, 1, "train.py(5): log_metrics")]
    assert (data["cpuProfile"]["samples"], data["timeDeltas"], data["durations"]) == ([2, 2], [0, 3000], [10000] * 2)


def test_chunks_of_threads_at_the_same_time():
    """Chunks of two threads that begin in the same microsecond have different ids, which Perfetto reads as numbers of 64 bits."""
    taken = samples([BASE + MS, BASE + MS], [0, 0], [0, 1])
    threads = [RecordedThread(tid, tid, 0, "") for tid in (4_194_303, (1 << 40) + 1)]
    lines = b"".join(sample_pieces(taken, threads, BASE, 1)).decode().lstrip(",\n").split(",\n")
    ids = {event["tid"]: int(event["id"], 16) for event in map(json.loads, lines)}
    assert len(set(ids.values())) == 2
    assert max(ids.values()) < 1 << 64


FRAME = {"functionName": "a.py(2): f"}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ([], "an object"),
        ({}, "cpuProfile"),
        ({"cpuProfile": {"nodes": {}}}, "a list"),
        ({"cpuProfile": {"nodes": [{"id": 1, "callFrame": {}}]}}, "a text"),
        ({"cpuProfile": {"nodes": [{"id": 1, "callFrame": {"functionName": "f"}}]}}, "file\\(line\\): function"),
        ({"cpuProfile": {"nodes": [{"id": -1, "callFrame": FRAME}]}}, "from 0"),
        ({"cpuProfile": {"nodes": [{"id": 1, "parent": [], "callFrame": FRAME}]}}, "a whole number"),
        ({"cpuProfile": {"samples": 5}}, "a list"),
        ({"cpuProfile": {"samples": [1]}, "timeDeltas": [1], "durations": []}, "as many"),
        ({"cpuProfile": {"samples": [1]}, "timeDeltas": [-1], "durations": [1]}, "from 0"),
        ({"cpuProfile": {"samples": [1]}, "timeDeltas": [1e300], "durations": [1]}, "from 0"),
    ],
)
def test_malformed_chunks(data, complaint):
    """Anything else than the format is an error that says what was expected."""
    with pytest.raises(MalformedError, match=complaint):
        parsed_chunk(data, "ProfileChunk")


def test_wrong_chunks():
    """Stacks that a wrong chunk has no end to are cut, unknown frames are none, and times do not overflow."""
    nodes = [{"id": number, "parent": number - 1, "callFrame": FRAME} for number in range(1, 200)]
    nodes.append({"id": 7, "parent": 7, "callFrame": FRAME})
    most = 1 << 61
    data = {"cpuProfile": {"nodes": nodes, "samples": [199, 7, 500]}, "timeDeltas": [most] * 3, "durations": [most] * 3}
    found = parsed_chunk(data, "ProfileChunk")
    assert [len(found.stacks[index]) for index in found.indices] == [64, 8, 0]
    assert max(*found.times, *found.durations) < most
    assert found.stacks[0][0] == Call("a.py", 2, "f")


def test_a_chunk_that_cannot_be_read(tmp_path):
    """Events of a trace whose samples are wrong are read; the message names the first, with its place. V8's own chunks are left out."""
    path = tmp_path / "trace.json"
    profile_with(TAKEN).export_chrome_trace(path)
    document = json.loads(path.read_text())
    wrong = {"ph": "P", "cat": "python_samples", "name": "ProfileChunk", "pid": 1, "tid": 2}
    document["traceEvents"] += [
        {**wrong, "ts": 1},
        {**wrong, "ts": 1, "args": 5},
        {**wrong, "ts": "x", "args": {}},
        {**wrong, "ts": 1, "cat": "v8"},
    ]
    path.write_text(json.dumps(document))
    events = read_events([str(path)])
    assert len(written(events.samples)) == 5
    assert any(
        "not counted: samples of 1; the first: ProfileChunk is of type NoneType" in each for each in events.problems
    )
    assert any("not counted: 2; the first: " in each for each in events.problems)
    assert events.left_out["marks, samples and dumps"] == 1
    loaded = otp.load(path)
    assert written(loaded._batch().samples) == written(profile_with(TAKEN)._batch().samples)
    assert loaded.is_partial


def test_chrome_of_spans_there_and_back(tmp_path):
    """A file of a ChromeTraceExporter has the samples on its spans, for readers of events and for load."""
    prof, path = profile_with(TAKEN), tmp_path / "spans.json"
    exporter = otp.ChromeTraceExporter(path)
    prof.export(exporter)
    exporter.shutdown()
    assert written(otp.load(path)._batch().samples) == written(prof._batch().samples)
    assert len(written(read_events([str(path)]).samples)) == 5


@pytest.mark.parametrize("form", ["chrome", "lines"])
def test_merged_ranks_keep_their_samples(tmp_path, form):
    """Merging moves samples with their events: those of spans and those of tracks, which Perfetto finds at the time that readers find."""
    meetings, clocks = Meetings(2, 50), (WrongClock(), WrongClock(10**9))
    text = json.dumps({"stacks": [["train.py:5 log"]], "samples": [[0.001, 0.01, 0]]})
    files = []
    for rank, clock in enumerate(clocks):
        trace = meetings.trace(rank, clock)
        step = next(found for name, _, _, found in trace.spans if name == "torch.step")
        step["torch.samples"] = text
        moved = replace(samples([BEGIN + MS], [0]), time=np.array([clock.of(BEGIN + MS)]))
        lines = b"".join(sample_pieces(moved, [RecordedThread(77, 77, 0, "")], BASE, 4711)).decode()
        trace.events += [json.loads(line) for line in lines.lstrip(",\n").split(",\n")]
        files.append(str(getattr(trace, form)(tmp_path / str(rank))))
    out = tmp_path / "merged.json"
    assert merge(files, str(out)).problems == ()
    found = read_events([str(out)])
    base = json.loads(out.read_text())["baseTimeNanoseconds"]
    expected = [BEGIN + MS] * (4 if form == "chrome" else 2)
    assert found.samples.time + base == pytest.approx(expected, abs=200_000)
    assert {found.tracks[track][0] for track in found.samples.thread.tolist()} == {0, 1}
    for event in chunks_of(out):
        if event["name"] == "Profile":
            assert event["args"]["data"]["startTime"] == int(event["ts"])


# ---- for people ----


def test_show_lines(tmp_path, capsys):
    """``show --lines`` lists lines by time, with the program's line that called each; files of installed packages without their folder."""
    path = tmp_path / "trace.json"
    profile_with(TAKEN).export_chrome_trace(path)
    assert cli.main(["show", "--lines", "-q", str(path)]) == 0
    out, err = capsys.readouterr()
    assert [re.split(" {2,}", line.strip()) for line in out.splitlines()] == [
        ["Share", "Time", "Samples", "Line", "Called from"],
        ["40.0%", "20.000ms", "2", "train.py:5 log_metrics", "train.py:22 main"],
        ["40.0%", "20.000ms", "2", "torch/optim/adam.py:200 Adam.step", "train.py:30 main"],
        ["20.0%", "10.000ms", "1", "a dir/x:3.py:9 f.<locals>.<lambda>"],
        ["Samples: 5, of 50.000ms"],
    ]
    assert err == ""


@pytest.mark.parametrize("name", ["trace.otlp", "trace.jsonl", "trace.json"])
def test_show_lines_as_json(tmp_path, capsys, name):
    """``--json`` has the same from every format, for several files together."""
    files = [str(tmp_path / f"{number}-{name}") for number in range(2)]
    for number, file in enumerate(files):
        profile_with(TAKEN, start=10**18 + number * 60 * MS).export_as(file, format_of(file))
    assert cli.main(["show", "--lines", "--json", "-q", *files]) == 0
    found = checked("show", capsys.readouterr().out)
    assert (found["samples"], found["seconds"]) == (10, pytest.approx(0.1))
    first, second, third = found["lines"]
    assert first == {
        "share": pytest.approx(0.4),
        "seconds": pytest.approx(0.04),
        "samples": 4,
        **LOG._asdict(),
        "called_from": MAIN._asdict(),
    }
    assert (second["file"], third["called_from"]) == (DEEP.file, None)


def test_show_lines_of_hostile_names(tmp_path, capsys):
    """Names from a file neither move the cursor nor hide what is beside them; fewer rows say how many more there are."""
    stacks = [(Call("\x1b[2J.py", 1, "f\n\u202e"),), (Call("b.py", 2, "g"),)]
    profile_with(samples([MS, 2 * MS, 3 * MS], [0, 0, 1], stacks=stacks)).export_chrome_trace(tmp_path / "t.json")
    assert cli.main(["show", "--lines", "--rows", "1", "-q", str(tmp_path / "t.json")]) == 0
    out = capsys.readouterr().out
    assert r"\x1b[2J.py:1 f\n\u202e" in out
    assert "and 1 more: --rows -1" in out
    assert out.replace("\n", "").isprintable()


def test_show_lines_without_samples(tmp_path, capsys):
    """A file without samples has no lines, and the error says what it has instead."""
    path = str(tmp_path / "t.json")
    prof = profile_with(TAKEN)
    recorded = replace(prof._batch(), samples=None)
    prof._segments.batch = lambda: recorded
    prof.export_chrome_trace(path)
    assert cli.main(["show", "--lines", "-q", path]) == 1
    assert "has no samples of Python stacks; without --lines its averages are shown" in capsys.readouterr().err


def test_folded_stacks(tmp_path):
    """Without recorded stacks, export_stacks writes the sampled ones; for metrics of devices it has torch's error."""
    prof = profile_with(TAKEN)
    prof.export_stacks(tmp_path / "stacks")
    assert (tmp_path / "stacks").read_text().splitlines() == [
        "train.py(22):_main;train.py(5):_log_metrics 20000",
        "train.py(30):_main;/usr/lib/python3/site-packages/torch/optim/adam.py(200):_Adam.step 20000",
        "a_dir/x:3.py(9):_f.<locals>.<lambda> 10000",
    ]
    with pytest.raises(AssertionError, match="requires with_stack=True"):
        prof.export_stacks(tmp_path / "stacks", "self_cuda_time_total")


def test_convert_says_what_becomes_of_samples(tmp_path, capsys):
    """``convert`` to spans says that samples are on steps; to a Chrome trace nothing is lost."""
    path = tmp_path / "t.json"
    profile_with(TAKEN).export_chrome_trace(path)
    for out, is_said in (("out.otlp", True), ("out.json", False)):
        assert cli.main(["convert", "-q", str(path), "-o", str(tmp_path / out)]) == 0
        assert ("samples of stacks are only on spans of steps" in capsys.readouterr().err) == is_said
        assert written(otp.load(tmp_path / out).samples) == written(otp.load(path).samples)
