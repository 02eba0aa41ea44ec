"""What a policy does with what comes late, crosses, is too much for a request, or fails: by labels and steps, without torch."""

from __future__ import annotations

import threading

from policy_jobs import job

import otel_torchprof as otp
from otel_torchprof._export.span_buffer import SpanBuffer
from otel_torchprof._export.span_policy import SlowDetector
from otel_torchprof._instrument import live_recording
from otel_torchprof._record.recording import Recording


def test_a_drain_that_fails_takes_nothing_else_with_it(monkeypatch):
    """What was held when a drain failed is sent with the next, also after the last one; what failed is counted."""
    with job(otp.SpanPolicy()) as program:
        program.step("first")
        program.drain()
        with otp.record_function("held"):
            pass
        program.drain()
        working = SpanBuffer._needs_processing
        calls = []

        def failing(*args):
            calls.append(args)
            if len(calls) == 1:
                raise MemoryError
            return working(*args)

        with otp.record_function("lost"):
            pass
        monkeypatch.setattr(SpanBuffer, "_needs_processing", failing)
        spans = program.spans()
        health = program.processor.health
    assert [s.name for s in spans if s.name in {"held", "lost"}] == ["held"]
    assert health.dropped == {"failed": 1}
    assert [s.attributes["torch.step.number"] for s in spans if s.name == "torch.step"] == [0, 1]


def test_steps_that_end_while_a_drain_runs_keep_their_events(monkeypatch):
    """Events that are recorded while a drain runs belong to their own steps, and not to the one that runs at the next drain."""
    taken, over = threading.Event(), threading.Event()

    def drain(recording, *args):
        batch = working(recording, *args)
        taken.set()
        assert over.wait(30)
        return batch

    working = Recording.drain
    with job(otp.SpanPolicy()) as program:
        program.step("first")
        program.drain()
        program.step("second")
        monkeypatch.setattr(Recording, "drain", drain)
        thread = threading.Thread(target=program.drain)
        thread.start()
        assert taken.wait(30)
        program.step("third")
        program.step("fourth")
        over.set()
        thread.join()
        spans = program.spans()
    names = {s.context.span_id: s.attributes["torch.step.number"] for s in spans if s.name == "torch.step"}
    assert [(s.name, names[s.parent.span_id]) for s in spans if s.parent] == [
        ("first", 0),
        ("second", 1),
        ("third", 2),
        ("fourth", 3),
    ]


def test_steps_that_wait_for_the_next_drain_when_one_fails_come_once(monkeypatch):
    """A step that ended after its drain took the events has one span, also if the last thing that this drain did has failed."""

    def drain(recording, *args):
        batch = working(recording, *args)
        monkeypatch.setattr(Recording, "drain", working)
        loop = threading.Thread(target=program.step, args=("third",))
        loop.start()
        loop.join()
        return batch

    def failing(_batch):
        monkeypatch.setattr(live_recording, "taken_samples", taken_samples)
        raise MemoryError

    working, taken_samples = Recording.drain, live_recording.taken_samples
    with job(otp.SpanPolicy()) as program:
        program.step("first")
        program.drain()
        program.step("second")
        monkeypatch.setattr(Recording, "drain", drain)
        monkeypatch.setattr(live_recording, "taken_samples", failing)
        assert not program.provider.force_flush()
        program.step("fourth")
        spans = program.spans()
    numbers = [s.attributes["torch.step.number"] for s in spans if s.name == "torch.step"]
    assert numbers == [0, 2, 3]  # that of step 1 was lost with its drain


def test_steps_of_a_drain_that_fails_are_judged_once(monkeypatch):
    """A step that was decided on when its drain failed comes with the next one: it is not counted, and not compared, twice."""
    judged, working = [], live_recording.drained_spans

    def failing(*args, **options):
        monkeypatch.setattr(live_recording, "drained_spans", working)
        raise MemoryError

    def takes(detector, name, duration):
        judged.append(duration)
        return original(detector, name, duration)

    original = SlowDetector.takes
    monkeypatch.setattr(SlowDetector, "takes", takes)
    with job(otp.SpanPolicy(keep="slow")) as program:
        program.step("first")
        program.drain()
        program.step("second")
        monkeypatch.setattr(live_recording, "drained_spans", failing)
        assert not program.provider.force_flush()
        program.step("third")
        program.drain()
        health = program.processor.health
    assert len(judged) == len(set(judged))
    assert health.spans.get("root_only", 0) + health.spans.get("sampled", 0) == len(judged)


def test_what_fails_when_it_is_its_turn_is_counted(monkeypatch):
    """A unit that cannot be decided on is lost with its held spans, once, and what comes after it is not."""
    with job(otp.SpanPolicy(max_spans=10)) as program:
        program.step("first")
        program.drain()
        program.step("second")
        for _ in range(10):
            with otp.record_function("third"):
                pass
        program.drain()
        program.step()
        monkeypatch.setattr("otel_torchprof._export.span_buffer.reduced_together", lambda *_: 1 / 0)
        assert not program.provider.force_flush()
        monkeypatch.undo()
        program.step("fourth")
        spans = program.spans()
        health = program.processor.health
    assert [s.name for s in spans if s.parent] == ["first", "second", "fourth"]
    assert (health.dropped, health.spans["failed"]) == ({}, 10)


def test_crossing_labels_stay_together(monkeypatch):
    """A label that ends after the one it began in belongs to it, in what is kept, in the budget, and in what is sent in parts."""
    monkeypatch.setattr("otel_torchprof._export.span_buffer.MAX_BUFFERED_NS", 0)
    with job(otp.SpanPolicy(max_spans=10, job_interval=0)) as program:
        outer, inner = otp.record_function("outer"), otp.record_function("inner")
        with program.provider.get_tracer("app").start_as_current_span("request") as request:
            outer.__enter__()
            inner.__enter__()
            for _ in range(20):
                with otp.record_function("label"):
                    pass
            outer.__exit__(None, None, None)
            program.drain()
            assert {s.name for s in program.exporter.get_finished_spans() if s.parent is not None} == {"label"}
            inner.__exit__(None, None, None)
        spans = program.spans()
    ids = {s.context.span_id: s.context.trace_id for s in spans} | {request.context.span_id: request.context.trace_id}
    assert all(s.parent is None or ids[s.parent.span_id] == s.context.trace_id for s in spans)
    (last,) = (s for s in spans if s.name == "outer" and "torch.part" not in s.attributes)
    assert last.context.trace_id == request.context.trace_id
    assert last.attributes["torch.recorded_spans"] == 22
    assert program.processor.health.spans["aggregated"] == last.attributes["torch.aggregated_spans"]


def test_steps_that_shrink_keep_to_the_budget_of_a_request():
    """A loop in a span of the application fills its trace up to the budget, then its steps go to linked ones."""
    with job(otp.SpanPolicy(keep="slow", slow_quantile=None, max_spans=10)) as program:
        with program.provider.get_tracer("app").start_as_current_span("training") as span:
            for _ in range(15):
                program.step("label")
                program.drain()
        spans = program.spans()
    steps = [s for s in spans if s.name == "torch.step" and "torch.averages" in s.attributes]
    assert [s.attributes["torch.recorded_spans"] for s in steps] == [2] * 15
    assert sum(s.context.trace_id == span.context.trace_id for s in spans) == 10
    ends = {(s.context.trace_id, s.context.span_id) for s in spans} | {(span.context.trace_id, span.context.span_id)}
    links = [(link.context.trace_id, link.context.span_id) for s in spans for link in s.links]
    assert len(links) > 15
    assert set(links) <= ends


def test_what_ends_after_its_step_keeps_to_the_budget(monkeypatch):
    """A label that outlives its step comes late: into the step's trace where there is room, else into one that links to it."""
    with job(otp.SpanPolicy(max_spans=10, job_interval=0)) as program:
        for inside in (1, 30):
            with otp.record_function("late"):
                for _ in range(inside):
                    with otp.record_function("label"):
                        pass
                program.step()
                program.drain()
            program.drain()
        spans = program.spans()
    steps = {
        s.attributes["torch.step.number"]: s
        for s in spans
        if s.name == "torch.step" and "torch.part" not in s.attributes
    }
    first, second = (s for s in spans if s.name == "late")
    assert first.parent.span_id == steps[0].context.span_id
    (part,) = (s for s in spans if s.context.span_id == second.parent.span_id)
    assert [link.context.span_id for link in part.links] == [steps[1].context.span_id]
    ids = {(s.context.trace_id, s.context.span_id) for s in spans}
    assert all(s.parent is None or (s.context.trace_id, s.parent.span_id) in ids for s in spans)


def test_a_job_that_steps_link_to_is_sent():
    """The one step of a program that ends in it links to a job that is there."""
    with job() as program:
        with program.provider.get_tracer("app").start_as_current_span("training"):
            program.step("label")
            thread = threading.Thread(
                target=lambda: otp.record_function("beside").__enter__().__exit__(None, None, None)
            )
            thread.start()
            thread.join()
            program.step("label")
        spans = program.spans()
    ids = {s.context.span_id for s in spans}
    assert "beside" in {s.name for s in spans}
    assert all(link.context.span_id in ids for s in spans for link in s.links)


def test_units_that_come_whole_shrink_all_at_once():
    """Thousands of requests of which nobody keeps the detail are not decided on one by one, at a quarter of a millisecond each."""
    with job(otp.SpanPolicy(keep="slow", slow_quantile=None)) as program:
        for _ in range(100):
            with otp.record_function("request"), otp.record_function("inner"):
                pass
        calls = []
        original = SpanBuffer._spans_to_send
        SpanBuffer._spans_to_send = lambda *args, **options: calls.append(args) or original(*args, **options)
        try:
            spans = program.spans()
        finally:
            SpanBuffer._spans_to_send = original
    assert len(spans) == 100
    assert not calls
    assert {s.attributes["torch.recorded_spans"] for s in spans} == {2}
