"""``detail="metrics"``: operators of some steps as metrics, without a span, and nothing left in torch in between."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from forked import in_child  # noqa: E402
from instrumented import Collecting  # noqa: E402
from observed import callbacks, counts  # noqa: E402
from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402
from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF  # noqa: E402
from providers import new_provider  # noqa: E402
from torch.optim import optimizer as optimizers  # noqa: E402
from torch_metrics import data_points, points, value  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._export import draining  # noqa: E402
from otel_torchprof._instrument import metrics_instrumentation  # noqa: E402

LONG = 30
NOTHING = (False, False)


def hooks() -> int:
    return len(optimizers._global_optimizer_post_hooks)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(monkeypatch):
    """Whatever a test does, torch has no callback of ours after it."""
    monkeypatch.setattr(draining, "_LOOK_SECONDS", 0.01)
    before = hooks()
    yield
    if otp.TorchInstrumentor().is_instrumented_by_opentelemetry:
        otp.TorchInstrumentor().uninstrument()
    assert callbacks() == NOTHING
    assert hooks() == before


@contextmanager
def instrumented(*, readers: int = 1, **options):
    """Metrics on, and their readers."""
    found = [InMemoryMetricReader() for _ in range(readers)]
    provider = MeterProvider(found, shutdown_on_exit=False)
    otp.TorchInstrumentor().instrument(meter_provider=provider, **{"detail": "metrics", **options})
    try:
        yield found[0] if readers == 1 else found
    finally:
        otp.TorchInstrumentor().uninstrument()
        provider.shutdown()


@pytest.fixture
def step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(2, 8)

    def run(middle=lambda: None) -> None:
        optimizer.zero_grad()
        loss = model(x).sum()
        middle()
        loss.backward()
        optimizer.step()

    run()
    return run


def calls(reader) -> dict[str, int]:
    return {about["torch.op.name"]: count for about, count in points(reader, "torch.op.calls")}


def steps(reader) -> dict[bool, int]:
    return {about["torch.sampled"]: count for about, count in points(reader, "torch.steps")}


def sampler():
    return otp.TorchInstrumentor()._running._sampler


def run_until(condition, body) -> None:
    """Runs ``body`` again and again until something has happened."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        body()


def test_counts_are_those_of_a_profile(step):
    """Where every step is recorded, each operator has as many calls, and as much time and self time, as a profile of the same steps."""
    with instrumented(overhead=1.0, max_operators=1000) as reader:
        with otp.profile(all_threads=True) as prof:
            for _ in range(20):
                step()
        found = calls(reader)
        times = dict(points(reader, "torch.op.time")[0][0])
    averages = prof.key_averages()
    expected = {name: count for (name, _, is_label), count in counts(averages).items() if not is_label}
    assert found == expected
    assert times
    total = sum(time for _, time in points(reader, "torch.op.self_time"))
    theirs = sum(row.self_cpu_time_total for row in averages if not row.is_user_annotation) / 1e6
    assert total == pytest.approx(theirs, rel=1e-3)


def test_every_step_is_counted(step):
    """Where every step is recorded, all steps count as such, and all but the first, whose begin is not known, have durations."""
    with instrumented(overhead=1.0) as reader:
        for _ in range(10):
            step()
        assert steps(reader) == {True: 10, False: 0}
        assert value(reader, "torch.step.duration").count == 9


def test_nothing_is_registered_between_recorded_steps(step):
    """Torch has an observer in the steps that are recorded, and none in the others."""
    seen = set()
    with instrumented(overhead=0.1) as reader:
        run_until(
            lambda: sampler().recorded_steps >= 20 and len(seen) > 1,
            lambda: (step(), seen.add((sampler().is_on, callbacks()[0]))),
        )
        counted = steps(reader)
    assert seen == {(True, True), (False, False)}
    assert counted[True] >= 20
    assert counted[False] > 0


def test_recorded_steps_are_whole(step):
    """What is counted in sampled steps is a whole number of steps' operators: calls per sampled step are those of one step."""
    with instrumented(overhead=0.1) as reader:
        run_until(lambda: sampler().recorded_steps >= 20 and not sampler().is_on, step)
        found, recorded = calls(reader), steps(reader)[True]
    assert found["aten::addmm"] == 2 * recorded
    assert found["aten::relu"] == recorded


def test_other_profiles_bring_nothing(step):
    """A profile of all threads that runs between recorded steps does not add to the metrics."""
    with instrumented(overhead=1e-9) as reader:
        run_until(lambda: sampler()._event_cost is not None, step)
        run_until(lambda: not sampler().is_on and not sampler().needs_reading, step)
        before = calls(reader)
        with otp.profile(all_threads=True) as prof:
            step()
        assert len(prof.events()) > 0
        assert calls(reader) == before


def test_the_cost_of_an_event_is_measured(step):
    """Calibration takes place by itself, and what it runs is not counted."""
    with instrumented(overhead=1e-9) as reader:
        run_until(lambda: sampler()._event_cost is not None, step)
        assert 3e-8 <= sampler()._event_cost <= 2e-5
        assert "aten::neg_" not in calls(reader)


def test_windows_without_steps(monkeypatch):
    """Inference has no steps: operators are recorded in windows of time, and how long these were is told."""
    monkeypatch.setattr("otel_torchprof._record.step_marks._optimizer_classes", lambda: iter(()))
    monkeypatch.setattr(metrics_instrumentation, "_WINDOW_SECONDS", 0.005)
    x = torch.ones(3)
    with instrumented(overhead=0.1) as reader:
        run_until(lambda: otp.TorchInstrumentor().health.recorded > 0, x.neg)
        found = calls(reader)
        times = {about["torch.sampled"]: time for about, time in points(reader, "otel_torchprof.sampling.time")}
    assert list(found) == ["aten::neg"]
    assert times[True] > 0
    assert times[False] > 0
    assert points(reader, "torch.steps") == []


def test_exemplars_of_the_application(step):
    """The duration of a step that ended inside a sampled span of the application points to it; no span of torch's is made."""
    exporter = Collecting()
    tracers = new_provider(otp.TorchSpanProcessor(exporter))
    with instrumented(overhead=1.0, tracer_provider=tracers) as reader:
        with tracers.get_tracer("application").start_as_current_span("epoch") as epoch:
            for _ in range(3):
                step()
        exemplars = value(reader, "torch.step.duration").exemplars  # the newest of each bucket that a step fell into
    own = epoch.get_span_context()
    assert {(exemplar.trace_id, exemplar.span_id) for exemplar in exemplars} == {(own.trace_id, own.span_id)}
    tracers.shutdown()
    assert exporter.spans == []


@pytest.mark.parametrize("detail", ["steps", "ops"])
def test_exemplars_of_steps(step, detail):
    """With spans, the histogram is filled where a meter_provider is given, and points to a span of a step that was sent."""
    exporter = Collecting()
    tracers = new_provider(otp.TorchSpanProcessor(exporter))
    with instrumented(detail=detail, tracer_provider=tracers) as reader:
        for _ in range(4):  # the last has not ended
            step()
        assert tracers.force_flush()
        point = value(reader, "torch.step.duration")
        assert points(reader, "otel_torchprof.events.recorded")[0][1] == otp.TorchInstrumentor().health.recorded
        exported = points(reader, "otel.sdk.exporter.span.exported")
        assert [count for _, count in exported] == [len(exporter.spans), 0]
    assert point.count == 3
    ids = {(span.context.trace_id, span.context.span_id) for span in exporter.spans if span.name == "torch.step"}
    assert {(each.trace_id, each.span_id) for each in point.exemplars} <= ids
    assert point.exemplars
    tracers.shutdown()


def test_unsampled_traces_count(step):
    """Metrics do not depend on the traces' sampler: with none sampled all is counted, and there are no exemplars."""
    tracers = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    with instrumented(overhead=1.0, tracer_provider=tracers) as reader:
        with tracers.get_tracer("application").start_as_current_span("epoch"):
            for _ in range(3):
                step()
        assert calls(reader)["aten::addmm"] == 6
        assert list(value(reader, "torch.step.duration").exemplars) == []


def test_a_reader_in_the_middle_of_a_step(step):
    """Who reads while a step runs gets what has ended so far; in the end each call was counted once, by every reader."""
    so_far = []
    with instrumented(overhead=1.0, readers=2) as (first, second):
        for _ in range(3):
            step(lambda: so_far.append(calls(first)["aten::addmm"]))
        assert so_far == [2, 4, 6]
        assert calls(first) == calls(second)
        assert steps(second) == {True: 3, False: 0}
        own, whole = points(first, "torch.op.self_time"), points(first, "torch.op.time")
    assert sum(time for _, time in own) <= sum(time for _, time in whole)


def test_few_series(step):
    """No more operators have series than were asked for, with one more for the rest."""
    with instrumented(overhead=1.0, max_operators=5) as reader:
        for _ in range(3):
            step()
        found = calls(reader)
    assert len(found) <= 6
    assert "other" in found


def test_sums_go_on_after_a_break(step):
    """Instrumented a second time, the same provider's sums go on where they were."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    for expected in (1, 2):
        otp.TorchInstrumentor().instrument(meter_provider=provider, detail="metrics", overhead=1.0)
        step()
        otp.TorchInstrumentor().uninstrument()
        step()
        assert (calls(reader)["aten::relu"], steps(reader)[True]) == (expected, expected)


def test_explicit_steps(step):
    """Where the program says itself where steps end, optimizers do not."""
    with instrumented(overhead=1.0) as reader:
        for _ in range(4):
            step()
            step()
            otp.TorchInstrumentor().step()
        # The first step of an optimizer came before the program's first word.
        assert sum(steps(reader).values()) in {4, 6}


def test_the_providers_shutdown_ends_it(step):
    """When the MeterProvider is shut down, which tells nobody, torch is left alone soon after."""
    provider = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    otp.TorchInstrumentor().instrument(meter_provider=provider, detail="metrics", overhead=1.0)
    assert callbacks()[0]
    provider.shutdown()
    run_until(lambda: not callbacks()[0] and hooks() == 0, step)
    assert otp.TorchInstrumentor().health.sources["recording"] == "off: not instrumented"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("overhead", [0.1, 1.0])
def test_a_forked_child_is_clean(step, overhead):
    """A child that is forked while a step is recorded has no observer left of its parent's, counts from nothing, and goes on by itself."""

    def child():
        left = callbacks()[0]
        if overhead == 1.0:  # on again by itself, with a session of its own
            for _ in range(2):  # no backward pass: torch refuses that in a child if any ran on threads before
                torch.ones(2).relu()
                otp.TorchInstrumentor().step()
            return left, steps(reader), calls(reader)["aten::relu"], callbacks()[0]
        return left, steps(reader), calls(reader), otp.TorchInstrumentor().health.sources["recording"]

    with instrumented(overhead=overhead) as reader:
        run_until(lambda: sampler().recorded_steps > 0, step)
        run_until(lambda: sampler().is_on, step)
        assert callbacks()[0]
        said = in_child(child)
        step()
        expected = (True, {True: 2, False: 0}, 2, True) if overhead == 1.0 else (False, {}, {}, "on")
        assert said == repr(expected)
        assert steps(reader)[True] > 0
        run_until(lambda: sampler().is_on, step)  # and the parent goes on


def test_health_says_how_much_is_recorded(step):
    """Health tells of how many steps one is recorded, and what that costs, as measured and as allowed."""
    with instrumented(overhead=0.1):
        run_until(lambda: sampler().recorded_steps >= 5, step)
        said = str(otp.TorchInstrumentor().health)
    assert "recording on; steps on; operators on" in said
    assert ", 1 step in " in said
    assert "% of the time, 10.00% is allowed" in said
    with instrumented(overhead=1.0):
        assert otp.TorchInstrumentor().health.notes == ("operators of every step are recorded",)


def test_without_the_library(step, monkeypatch, caplog):
    """Where operators cannot be recorded steps still are; a warning and health say why."""

    def fails():
        raise otp.TorchLibraryError("there is no compiler")

    monkeypatch.setattr(metrics_instrumentation.torch_library, "load", fails)
    with caplog.at_level(logging.WARNING, "otel_torchprof"), instrumented(overhead=1.0) as reader:
        step()
        step()
        assert steps(reader) == {True: 0, False: 2}
        assert data_points(reader, "torch.op.calls") == []
        assert otp.TorchInstrumentor().health.sources["operators"] == "off: there is no compiler"
    assert "not counted, steps are: there is no compiler" in caplog.text


def test_settings_of_the_environment(step, monkeypatch, caplog):
    """Detail, share and number of operators are variables too; bad ones are warned of and ignored."""
    monkeypatch.setenv("OTEL_TORCHPROF_DETAIL", "metrics")
    monkeypatch.setenv("OTEL_TORCHPROF_METRICS", "overhead=1,max_operators=5")
    with instrumented(detail=None) as reader:
        step()
        assert len(calls(reader)) == 6
    monkeypatch.setenv("OTEL_TORCHPROF_METRICS", "overhead=5,max_operators=many")
    with caplog.at_level(logging.WARNING, "otel_torchprof"), instrumented():
        assert otp.TorchInstrumentor()._running._overhead == 0.01
    assert "OTEL_TORCHPROF_METRICS: overhead='5' is ignored: allowed is a number above 0, up to 1" in caplog.text
    assert "OTEL_TORCHPROF_METRICS: max_operators='many' is ignored" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"overhead": 0}, ValueError, "overhead is 0; allowed is a number above 0, up to 1"),
        ({"overhead": 1.5}, ValueError, "overhead is 1.5"),
        ({"overhead": "much"}, ValueError, "overhead is 'much'"),
        ({"overhead": True}, ValueError, "overhead is True"),
        ({"max_operators": 0}, ValueError, "max_operators is 0; allowed is a whole number above 0"),
        ({"max_operators": 2.5}, ValueError, "max_operators is 2.5"),
        ({"meter_provider": 5}, TypeError, "meter_provider is 5; it must be a MeterProvider"),
    ],
)
def test_bad_arguments(options, error, message):
    """A keyword that is wrong raises an error that names it, its value and what is allowed; nothing is switched on."""
    with pytest.raises(error, match=message):
        otp.TorchInstrumentor().instrument(detail="metrics", **options)
    assert not otp.TorchInstrumentor().is_instrumented_by_opentelemetry
