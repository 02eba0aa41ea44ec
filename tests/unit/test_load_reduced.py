"""``otp.load`` of files in which large traces were reduced: sums are those of ``show``, in every format, and what is missing is said."""

from __future__ import annotations

import copy
import itertools
import json
import pickle

import pytest

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._cli.show import read
from otel_torchprof._export.formats import TRACE_ENDINGS
from otel_torchprof._model.reductions import COLLAPSED

STEP = {"torch.step": "ProfilerStep*"}
"""Name of a step in OTLP, and in a profile."""


def shown(path):
    """Calls, total and self time of each name as ``show`` adds them up, ns."""
    return {STEP.get(row.name, row.name): tuple(row[2:5]) for row in read(str(path))[0].averages()}


def loaded(prof):
    """The same of a profile, or of its list of events."""
    return {
        row.key: (row.count, round(row.cpu_time_total * 1000), round(row.self_cpu_time_total * 1000))
        for row in prof.key_averages()
    }


def run_steps(step, count=3):
    """Steps with runs of short labels, which are aggregated with what is in them, and with others, which are collapsed."""
    for _ in range(count):
        for _ in range(30):
            with otp.record_function("outer"), otp.record_function("inner"), otp.record_function("innermost"):
                pass
            with otp.record_function("other"), otp.record_function("outer"):
                pass
        for number in range(40):
            with otp.record_function("run"), otp.record_function(f"of {number % 2}"):
                pass
        step()


@pytest.fixture(params=["live.otlp", "live.jsonl.gz", "live.json"])
def reduced(request, tmp_path):
    """The path of a file with reduced traces, as the live path writes it; Chrome JSON is a converted one."""
    otlp = request.param.replace(".json", ".jsonl") if request.param == "live.json" else request.param
    path = tmp_path / otlp
    policy = otp.SpanPolicy(max_spans=40, short=10)
    with otp.stream(otp.OTLPFileExporter(path), detail="modules", policy=policy) as streamed:
        run_steps(streamed.step)
    if request.param != otlp:
        assert cli.main(["convert", "-q", str(path), "-o", str(tmp_path / request.param)]) == 0
    return tmp_path / request.param


def test_averages_are_those_of_show(reduced):
    """Aggregate spans count as the calls that they stand for, collapsed ones have an entry: counts, totals and self times."""
    prof = otp.load(reduced)
    figures = loaded(prof)
    assert figures == shown(reduced)
    assert sum(count for name, (count, *_) in figures.items() if name != "torch.setup") == 3 * (30 * 5 + 80 + 1)
    assert figures[COLLAPSED][0] > 0
    assert len(prof.events()) < 3 * 40 + 2
    assert sum(event.count for event in prof.events()) == prof.total_average().count
    assert prof.total_average().count == sum(count for count, *_ in figures.values()) - figures[COLLAPSED][0]
    assert [step.number for step in prof.steps] == [0, 1, 2]


def test_events_stand_for_calls(reduced):
    """An event has the number and total duration of its calls, also in arrays and in a data frame; the note says what is missing."""
    prof = otp.load(reduced)
    (aggregate, *_) = (event for event in prof.events() if event.count > 1)
    assert 0 < aggregate.cpu_time_total <= aggregate.time_range.elapsed_us() + 1e-3
    of_event = prof.reductions["event"] == aggregate.id
    assert prof.reductions["calls"][of_event].tolist() == [aggregate.count]
    assert prof.reductions["duration"][of_event].item() == round(aggregate.cpu_time_total * 1000)
    frame = prof.to_pandas()
    assert frame["count"].tolist() == [event.count for event in prof.events()]
    prof.events()[0].name = "changed"
    again = prof.to_pandas()
    assert again["count"].tolist() == frame["count"].tolist()
    assert again["cpu_time_total"].tolist() == frame["cpu_time_total"].tolist()
    calls = prof.reductions["calls"]
    texts = (
        f"{calls[calls > 1].sum():,} calls aggregated into {(calls > 1).sum()} events",
        f"{prof.reductions['collapsed'].sum():,} collapsed: single durations, order and shapes",
    )
    assert all(any(text in note for note in prof.health.notes) for text in texts)


def test_sums_over_objects_are_those_over_columns(reduced):
    """After an event was changed, or the list copied, the averages have the same counts and times, and what was collapsed is no self time."""
    prof = otp.load(reduced)
    before, own = loaded(prof), prof.total_average().self_cpu_time_total
    copied = pickle.loads(pickle.dumps(prof.events()))  # noqa: S301 - our own
    prof.events()[0].name = prof.events()[0].name
    edited = prof.events()
    edited.sort(key=lambda event: -event.count)
    for events in (copied, edited):
        assert loaded(events) == before
        assert events.total_average().self_cpu_time_total == pytest.approx(own)


@pytest.mark.parametrize(
    "copy_of",
    [copy.copy, copy.deepcopy, lambda event: pickle.loads(pickle.dumps(event))],  # noqa: S301 - our own
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_of_events_have_their_times(reduced, copy_of):
    """A copy of an event that stands for several calls has their number and total duration, and its self time; so has a copy of the copy."""
    events = [event for event in otp.load(reduced).events() if event.count > 1][:9]
    expected = [(event.count, event.cpu_time_total, round(event.self_cpu_time_total, 3)) for event in events]
    assert any(event.cpu_time_total < event.time_range.elapsed_us() - 1e-3 for event in events)
    for _ in range(2):
        events = [copy_of(event) for event in events]
        assert [(e.count, e.cpu_time_total, round(e.self_cpu_time_total, 3)) for e in events] == expected


@pytest.mark.parametrize("ending", [*TRACE_ENDINGS])
def test_a_round_trip_keeps_the_counts(reduced, tmp_path, ending):
    """The output of ``convert``, in any format, has the same counts and times for ``show`` and for ``load``."""
    output, again = tmp_path / f"out{ending}", tmp_path / f"again{ending}"
    assert cli.main(["convert", "-q", str(reduced), "-o", str(output)]) == 0
    assert cli.main(["convert", "-q", str(output), "-o", str(again)]) == 0
    before = {name: figures for name, figures in shown(reduced).items() if name not in {"ProfilerStep*", "torch.setup"}}
    for path in (output, again):
        after = shown(path)
        assert {name: after.get(name) for name in before} == before
        figures = loaded(otp.load(path))
        assert {name: figures.get(name) for name in before} == before


def test_metadata_stays_in_a_chrome_trace(reduced, tmp_path):
    """Members that the user added are in the document of spans too."""
    prof = otp.load(reduced)
    prof.add_metadata("run", "7")
    prof.export_chrome_trace(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["run"] == "7"


def reduced_profile(path, step=None):
    """Writes a profile within a size limit, and returns it."""
    with otp.profile(operators=False) as prof:
        run_steps(getattr(prof, step) if step else lambda: None)
    exporter = otp.OTLPFileExporter(path)
    prof.export(exporter, policy=otp.SpanPolicy(max_spans=40, short=10))
    exporter.shutdown()
    return prof


def test_a_profile_without_steps_gets_no_more_events_by_conversions(tmp_path):
    """The root of a file without steps is the recording, and no event, in Chrome JSON as in OTLP; it is the window of the profile."""
    reduced_profile(tmp_path / "0.otlp")
    before = otp.load(tmp_path / "0.otlp")
    paths = [str(tmp_path / name) for name in ("0.otlp", "1.json", "2.json", "3.json", "4.otlp")]
    for source, target in itertools.pairwise(paths):
        assert cli.main(["convert", "-q", source, "-o", target]) == 0
        prof = otp.load(target)
        assert loaded(prof) == loaded(before)
        assert prof.total_average().self_cpu_time_total == before.total_average().self_cpu_time_total
        assert (prof.health.start_ns, prof.health.stop_ns) == (before.health.start_ns, before.health.stop_ns)
        assert [(span.name, span.parent) for span in prof.spans() if span.parent is None] == [("torch.profile", None)]


def test_steps_that_become_events_are_said(tmp_path, capfd):
    """The steps of a profile are labels in Chrome JSON of spans, once: the command says so."""
    reduced_profile(tmp_path / "t.otlp", "step")
    paths = [str(tmp_path / name) for name in ("t.otlp", "1.json", "2.json")]
    said = []
    for source, target in itertools.pairwise(paths):
        assert cli.main(["convert", "-q", source, "-o", target]) == 0
        said.append("steps are labels in the output, and events" in capfd.readouterr().err)
        assert loaded(otp.load(target))["ProfilerStep*"][0] == len(otp.load(target).steps) == 3
    assert said == [True, False]


@pytest.mark.parametrize("name", ["t.otlp", "t.jsonl"])
def test_a_profile_within_a_size_limit(tmp_path, name):
    """What a profile sends within a limit is read back with the profile's own sums, its collapsed calls in their entry."""
    prof = reduced_profile(tmp_path / name, "step")
    back = otp.load(tmp_path / name)
    figures = loaded(back)
    before = loaded(prof)
    collapsed = figures.pop(COLLAPSED)
    assert sum(calls for calls, *_ in figures.values()) + collapsed[0] == sum(calls for calls, *_ in before.values())
    assert sum(own for *_, own in figures.values()) + collapsed[2] == sum(own for *_, own in before.values())
    assert figures["run"] == before["run"]
    of_show = shown(tmp_path / name)
    assert {name: of_show[name] for name in figures} == figures
    assert of_show[COLLAPSED] == collapsed


def test_its_steps_are_explained(tmp_path):
    """The explanation of a loaded file has the steps of the command's, also after the file was deleted."""
    path = tmp_path / "t.otlp"
    policy = otp.SpanPolicy(max_spans=40, short=10)
    with otp.stream(otp.OTLPFileExporter(path), detail="modules", policy=policy) as streamed:
        run_steps(streamed.step, 30)
    prof = otp.load(path)
    assert otp.explain(path).steps == 30
    path.unlink()
    assert prof.explain().steps == 30
