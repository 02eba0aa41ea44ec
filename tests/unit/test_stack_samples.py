"""Samples of Python stacks: on which span they are, in files and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from policy_jobs import job
from sampled_profiles import LOG, MAIN, MS, STACKS, batch, profile_with, samples, written

import otel_torchprof as otp
from otel_torchprof._columns.samples import Call
from otel_torchprof._encode.sampled import MOST_TEXT, LiveSamples
from otel_torchprof._encode.spans import drained_spans
from otel_torchprof._files.event_columns import events_of_spans
from otel_torchprof._files.reading import read_events
from otel_torchprof._files.records import MalformedError
from otel_torchprof._files.stack_samples import LONGEST_TEXT, parsed_samples
from otel_torchprof._files.trace_events import joined
from otel_torchprof._model.live import placed_recording
from otel_torchprof._model.live_table import Flows
from otel_torchprof._model.step_spans import RecordedStep
from otel_torchprof._native.recorder import now_ns

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


def test_calls_beyond_64_are_cut():
    """A stack has its 64 innermost calls."""
    stack = tuple(Call("a.py", line, "f") for line in range(100))
    [root] = texts(batch(samples([5], [0], stacks=[stack])), RecordedStep(0, 0, 10, 70))
    assert root["stacks"] == [[f"a.py:{line} f" for line in range(64)]]


def test_one_stack_of_huge_names_is_left_out():
    """A single sample that does not fit is no attribute, and no endless search for one that fits."""
    stack = tuple(Call("p" * 4_000, line, "f") for line in range(64))
    assert texts(batch(samples([5], [0], stacks=[stack])), RecordedStep(0, 0, 10, 70)) == [None]


@pytest.mark.parametrize("hidden", ["code.file.path", "code.function.name", KEY])
def test_hidden_names_of_code_are_in_no_stack(monkeypatch, hidden):
    """Where files or functions are hidden, spans have no stacks."""
    monkeypatch.setenv("OTEL_TORCHPROF_HIDDEN_ATTRIBUTES", hidden)
    assert texts(batch(samples([5], [0])), RecordedStep(0, 0, 10, 70)) == [None]


# ---- live ----


def test_samples_wait_for_the_end_of_their_step():
    """Samples that come with an earlier drain than the end of their step are kept; those of a step that has ended are not kept."""
    live = LiveSamples()
    one, spans = placed(live.joined(batch(samples([5, 25], [0, 1]))), RecordedStep(0, 0, 10, 70))
    live.keep(one, spans)
    two = live.joined(batch(samples([27], [2]), (20, 26, 0)))
    assert two.samples.time.tolist() == [25, 27]
    live.keep(*placed(two, RecordedStep(1, 20, 30, 70)))
    empty = batch(None)
    assert live.joined(empty) is empty


def test_waiting_samples_keep_their_thread():
    """Batches number their threads anew: a waiting sample stays with its thread, also where the next batch has not got it."""
    live = LiveSamples()
    live.keep(*placed(batch(samples([5, 6], [0, 0], [0, 1])), RecordedStep(0, 0, 1, 70)))
    other = batch(None)
    for threads in (other.threads[::-1], other.threads[1:], ()):
        whole = live.joined(replace(other, threads=threads))
        assert [whole.threads[thread].ident for thread in whole.samples.thread.tolist()] == [70, 80]


def test_waiting_samples_are_bounded():
    """Samples that no step takes are dropped, the oldest first."""
    live = LiveSamples()
    live.keep(*placed(batch(samples(range(70_000), [0] * 70_000)), RecordedStep(0, 80_000, 80_001, 70)))
    assert live.joined(batch(None)).samples.time[[0, -1]].tolist() == [70_000 - 65_536, 69_999]


def test_live_steps_have_their_samples():
    """While a program runs, samples that one drain brings are on the steps that end in it and in a later one."""
    with job() as found:
        recording = found.processor._attached._recording
        drain, given = recording.drain, []

        def sampled(most):
            drained, times = drain(most), [given.pop(0) for _ in tuple(given)]
            thread = [number for number, known in enumerate(drained.threads) if known.name == "MainThread"]
            return replace(drained, samples=samples(times, [0] * len(times), thread * len(times)))

        recording.drain = sampled
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
        ('{"stacks":[[1]],"samples":[]}', "a text"),
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
    assert "not counted: torch.samples of 1; the first: " in problem
    assert "event 1, at byte" in problem
    loaded = otp.load(path)
    assert len(loaded.steps) == 2
    assert any("torch.samples of 1" in note for note in loaded.health.notes)


def test_spans_whose_samples_a_limit_has_cut_off(monkeypatch):
    """With a limit on the length of attributes, spans in memory have events without samples, and no error."""
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "50")
    events = events_of_spans(profile_with(TAKEN).spans())
    assert events.samples is None
    assert events.steps().sum() == 2
