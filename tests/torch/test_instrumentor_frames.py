"""TorchInstrumentor with detail "frames": Python's calls inside requests and steps, and who is in the way."""

from __future__ import annotations

import contextlib
import gc
import linecache
import logging
import os
import sys
import threading

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from test_instrumentor import Bench, Model, infer, no_optimizers, train  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._native.ffi import python_sources  # noqa: E402
from otel_torchprof._native.recorder import recorder_stats  # noqa: E402

LONG = 60


@pytest.fixture
def model() -> Model:
    return Model()


def fails() -> None:
    raise KeyError


def serve(bench: Bench, model: Model) -> None:
    """What a handler does, in a request."""
    with bench.tracer.start_as_current_span("request"):
        handled(model)


def handled(model: Model) -> None:
    with pytest.raises(KeyError):
        fails()
    infer(model)


def chain(spans, span) -> list[str]:
    """The names of a span and of all around it."""
    by_id = {other.context.span_id: other for other in spans}
    names = []
    while span is not None:
        names.append(span.name.rpartition(": ")[2])
        span = by_id.get(span.parent.span_id) if span.parent else None
    return names


def of(spans, name):
    return next(span for span in spans if span.name.endswith(name))


def test_calls_operators_and_modules_of_a_request(model, monkeypatch):
    """Calls are spans under the request that they serve, with operators and modules inside, and what is around it is none."""
    no_optimizers(monkeypatch)
    with Bench(detail="frames") as bench:
        serve(bench, model)
        spans, requests = bench.spans(), bench.processor.health.sources
    assert requests["frames"] == "on"
    enclosing = chain(spans, of(spans, "aten::addmm"))
    assert [name for name in enclosing if name in {"encoder.0", "encoder", "Model", "infer", "handled"}] == [
        "encoder.0",
        "encoder",
        "Model",
        "infer",
        "handled",
    ]
    assert enclosing[-1] == "handled"
    assert not {"serve", "test_calls_operators_and_modules_of_a_request"} & {
        name for s in spans for name in chain(spans, s)
    }
    handler = of(spans, ": handled")
    assert handler.attributes["code.function.name"] == f"{__name__}.handled"
    assert handler.attributes["code.file.path"] == __file__
    assert of(spans, ": fails").attributes["error.type"] in {"_OTHER", "KeyError"}
    assert all(span.status.is_ok for span in spans)
    assert not any(span.name.startswith("nn.Module: ") for span in spans)


def test_calls_of_steps_are_in_their_steps(model):
    """In a loop every call is in the trace of its step, and the loop is none."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Bench(detail="frames") as bench:
        train(model, optimizer, 3)
    spans = bench.exporter.get_finished_spans()
    steps = {span.context.trace_id: span.attributes["torch.step.number"] for span in spans if span.name == "torch.step"}
    assert sorted(steps.values()) == [0, 1, 2]
    forward = [
        s
        for s in spans
        if s.name.endswith(": forward") and s.attributes["code.function.name"].endswith("Model.forward")
    ]
    assert [steps[span.context.trace_id] for span in forward] == [0, 1, 2]
    assert not any(span.name.endswith(": train") for span in spans)


def test_exceptions_inside_of_calls_keep_no_step(model):
    """A step in which an exception left a call has not failed, one in which it left a label has: that one keeps its detail."""
    with Bench(detail="frames", policy=otp.SpanPolicy(keep="slow", slow_quantile=None)) as bench:
        for failing in (False, True):
            with pytest.raises(KeyError):
                fails()
            with contextlib.suppress(KeyError), otp.record_function("label"):
                infer(model)
                if failing:
                    raise KeyError
            otp.TorchInstrumentor().step()
        spans = bench.spans()
    steps = {span.context.trace_id: span.attributes["torch.step.number"] for span in spans if span.name == "torch.step"}
    assert {steps[span.context.trace_id] for span in spans if span.name.endswith(": fails")} == {1}


def test_a_filter_and_its_variables(model, monkeypatch):
    """A FrameFilter says which calls there are, and so do its variables; one that is none is refused by name."""
    no_optimizers(monkeypatch)
    mine = otp.FrameFilter(include=[__name__], c_functions=False)

    def calls(**options):
        with Bench(detail="frames", **options) as bench:
            serve(bench, model)
            return {span.name.rpartition(": ")[2] for span in bench.spans() if "code.function.name" in span.attributes}

    assert calls(frames=mine) == {"handled", "fails"}
    monkeypatch.setenv("OTEL_TORCHPROF_FRAMES", f"include={__name__}")
    assert calls() == {"handled", "fails"}
    with pytest.raises(TypeError, match="frames is 'all'; it must be a FrameFilter"):
        otp.TorchInstrumentor().instrument(detail="frames", frames="all")


def test_pauses_of_the_collector(model, monkeypatch):
    """A collection is a span where it happened, with its generation."""
    no_optimizers(monkeypatch)
    with Bench(detail="frames") as bench:
        with bench.tracer.start_as_current_span("request") as request:
            gc.collect(1)
        spans = bench.spans()
        callbacks = len(gc.callbacks)
    pause = of(spans, "generation 1")
    assert pause.attributes["cpython.gc.generation"] == 1
    assert pause.context.trace_id == request.get_span_context().trace_id
    assert len(gc.callbacks) == callbacks - 2  # that of the calls, and that of the phases


def test_unsampled_requests_have_no_calls(model, monkeypatch):
    """Where the sampler has refused a request, nothing is recorded of it."""
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    no_optimizers(monkeypatch)
    with Bench(detail="frames", sampler=ALWAYS_OFF) as bench:
        serve(bench, model)
        assert bench.spans() == ()


def test_threads_that_serve(model, monkeypatch):
    """Threads that start while it is on have their calls in their own requests."""
    no_optimizers(monkeypatch)
    with Bench(detail="frames") as bench:
        threads = [threading.Thread(target=serve, args=(bench, model)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        spans = bench.spans()
    handlers = [span for span in spans if span.name.endswith(": handled")]
    assert len({span.context.trace_id for span in handlers}) == len(handlers) == 4
    assert len({span.attributes["thread.id"] for span in handlers} | {0}) > 1


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from 3.12 on calls are told of by sys.monitoring")
def test_another_profiler_is_in_the_way(model, monkeypatch, caplog):
    """Where another tool has set a profile function it keeps it; health and one warning name it, and the rest is recorded."""
    no_optimizers(monkeypatch)

    def somebodys(*_: object) -> None:
        pass

    sys.setprofile(somebodys)
    try:
        with caplog.at_level(logging.WARNING, "otel_torchprof"), Bench(detail="frames") as bench:
            assert sys.getprofile() is somebodys
            serve(bench, model)
            names, health = bench.names(), bench.processor.health
    finally:
        sys.setprofile(None)
    assert "somebodys" in health.sources["frames"]
    assert health.sources["operators"] == "on"
    assert "aten::addmm" in names
    assert "Python's calls are not recorded" in caplog.text


def test_nothing_is_traced_afterwards(model):
    """uninstrument() stops the tracer; so does the provider's shutdown."""
    with Bench(detail="frames") as bench:
        assert isinstance(sys.getprofile(), python_sources.Frames) or sys.version_info >= (3, 12)
        bench.provider.shutdown()
        assert sys.getprofile() is None
    assert sys.getprofile() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_goes_on(model, monkeypatch):
    """A forked child records its own calls, in its own requests."""
    no_optimizers(monkeypatch)
    read, write = os.pipe()
    with Bench(detail="frames", frames=otp.FrameFilter(include=[__name__])) as bench:
        serve(bench, model)
        bench.spans()
        child = os.fork()
        if child == 0:
            try:
                serve(bench, model)
                found = {span.name.rpartition(": ")[2] for span in bench.spans()}
                os.write(
                    write, b"right" if {"handled", "fails", "Model", "aten::addmm"} <= found else repr(found).encode()
                )
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            assert answer.read() == b"right"
        assert os.waitpid(child, 0)[1] == 0


def interrupted_uninstrument(at):
    """Interrupts uninstrument() at a line of the package, counted from 0; where that was, empty where it came to its end."""
    left, where = at, ""

    def look(frame, event, _argument):
        nonlocal left, where
        path = frame.f_code.co_filename
        if "otel_torchprof" not in path:
            return None
        if event == "line" and not linecache.getline(path, frame.f_lineno).strip().startswith("with "):
            if left == 0:
                left, where = -1, f"{path}:{frame.f_lineno}"
                raise KeyboardInterrupt
            left -= left > 0
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        otp.TorchInstrumentor().uninstrument()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return where


def test_interrupt_at_any_line_of_uninstrument(model, monkeypatch):
    """A KeyboardInterrupt at whatever line leaves nothing in the interpreter or in torch, once uninstrument() is called again."""
    no_optimizers(monkeypatch)
    at, where, wrong = 0, "somewhere", []
    while where:
        bench = Bench(detail="frames").__enter__()
        serve(bench, model)
        where = interrupted_uninstrument(at)
        otp.TorchInstrumentor().uninstrument()
        bench.provider.shutdown()
        hooks = torch.nn.modules.module._has_any_global_hook()
        drains = [thread for thread in threading.enumerate() if thread.name == "otel-torchprof-drain"]
        if sys.getprofile() or threading.getprofile() or hooks or recorder_stats().sessions or drains:
            wrong.append(where)
        at += 31  # every line would take two minutes; which ones these are changes with the code
    assert wrong == []
    assert at > 200


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.tensor(index)


def test_what_a_phase_calls(monkeypatch):
    """The functions of the program that a loader calls are spans, in the phase of that."""
    no_optimizers(monkeypatch)
    with Bench(detail="frames") as bench:
        list(torch.utils.data.DataLoader(Numbers(), batch_size=2))
        spans = bench.spans()
    found = [span for span in spans if span.attributes.get("code.function.name", "").endswith("Numbers.__getitem__")]
    assert len(found) == 2
    assert all("torch.phase.data" in chain(spans, span) for span in found)
