"""Compiled regions, look-ups, compilations and graph breaks as events, and the captured share of steps."""

from __future__ import annotations

import gc
import os
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from providers import instrumented, new_provider

torch = pytest.importorskip("torch", minversion="2.6")

from torch._dynamo.callback import callback_handler  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._record.compile_events import CompileEvents  # noqa: E402

X = torch.ones(4, 4)
SHARE = "torch.compile.captured_share"


@pytest.fixture(autouse=True)
def fresh():
    """Each test compiles anew."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(x):
    return torch.relu(x @ x)


def broken(x):
    x = torch.relu(x @ x)
    torch._dynamo.graph_break(msg="because")
    return (x + 1).sigmoid()


def data_dependent(x):
    return x + 1 if x.sum() > 0 else x - 1


def named(prof, prefix):
    """The names of the events that begin so, in order."""
    return [event.name for event in prof.events() if event.name.startswith(prefix)]


def test_what_appears():
    """A model without graph breaks: its compilation and its region the first time, a look-up and its region from then on."""
    compiled = torch.compile(whole, backend="eager")
    with otp.profile() as prof:
        compiled(X)
        compiled(X)
    assert named(prof, "TorchDynamo Compile") == ["TorchDynamo Compile: 0/0"]
    assert named(prof, "Torch-Compiled Region") == ["Torch-Compiled Region: 0/0"] * 2
    assert named(prof, "TorchDynamo Cache Lookup") == ["TorchDynamo Cache Lookup"]
    assert named(prof, "TorchDynamo Graph Break") == []


@pytest.mark.parametrize(
    ("function", "reason"),
    [(broken, "Call to `torch._dynamo.graph_break()`"), (data_dependent, "generic_jump TensorVariable()")],
)
def test_a_graph_break_has_its_reason(function, reason):
    """A graph break is one event, inside the compilation that met it, with the first line of dynamo's reason."""
    compiled = torch.compile(function, backend="eager")
    with otp.profile() as prof:
        compiled(X)
        compiled(X)
    (found,) = (event for event in prof.events() if event.name.startswith("TorchDynamo Graph Break"))
    assert found.name == f"TorchDynamo Graph Break: {reason}"
    assert found.cpu_parent.name == "TorchDynamo Compile: 0/0"
    assert named(prof, "TorchDynamo Compile") == ["TorchDynamo Compile: 0/0", "TorchDynamo Compile: 1/0"]


def test_an_error_while_compiling_ends_the_compilation():
    """A backend that raises leaves no event open, and no graph break of before is told again."""

    def backend(*_):
        raise ValueError("no")

    torch.compile(broken, backend="eager")(X)
    with otp.profile() as prof, pytest.raises(Exception, match="no"):
        torch.compile(whole, backend=backend)(X)
    (compilation,) = (event for event in prof.events() if event.name.startswith("TorchDynamo Compile"))
    assert not named(prof, "TorchDynamo Graph Break")
    assert compilation.time_range.end < prof.health.stop_ns / 1000


def test_dynamo_calls_nobody_when_nothing_is_recorded():
    """Between profiles dynamo has no callbacks of ours, after any number of them, also of ones that were dropped running."""
    for _ in range(20):
        with otp.profile(), otp.profile():
            assert len(callback_handler.start_callbacks) == len(callback_handler.end_callbacks) == 1
    forgotten = otp.profile()
    forgotten.start()
    del forgotten
    gc.collect()
    assert callback_handler.start_callbacks == callback_handler.end_callbacks == []


def test_reset_in_the_middle():
    """After dynamo's reset, which drops all callbacks, a profile ends as ever and the next one has its own."""
    with otp.profile():
        torch._dynamo.reset()
    with otp.profile() as prof:
        torch.compile(broken, backend="eager")(X)
    assert len(named(prof, "TorchDynamo Graph Break")) == 1


def test_a_graph_break_that_cannot_be_told(monkeypatch, caplog):
    """What goes wrong with a graph break is logged; the program's compilation goes on."""
    monkeypatch.setattr(sys.modules["otel_torchprof._record.compile_events"], "_record_break", lambda _: 1 / 0)
    with otp.profile() as prof:
        torch.compile(broken, backend="eager")(X)
    assert "graph breaks were not recorded" in caplog.text
    assert len(named(prof, "TorchDynamo Compile")) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_no_callbacks():
    """A child that was forked from a profile compiles without telling anybody."""
    with otp.profile():
        pid = os.fork()
        if pid == 0:
            os._exit(len(callback_handler.start_callbacks))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_installing_is_counted():
    """The callbacks are dynamo's until the last of several is removed, in any order; removing twice is nothing."""
    one, other = CompileEvents(), CompileEvents()
    one.start()
    other.start()
    one.stop()
    one.stop()
    assert len(callback_handler.start_callbacks) == 1
    other.stop()
    assert not callback_handler.start_callbacks


def roots(spans):
    """The captured operators and their share, of the spans that are steps."""
    return [
        (span.attributes.get("torch.compile.captured_operators"), span.attributes.get(SHARE))
        for span in spans
        if span.name in {"torch.step", "torch.profile"}
    ]


def test_the_captured_share_of_steps():
    """The span of a step says how many of its outermost operators ran compiled; of one in which nothing did, nothing."""
    compiled = torch.compile(broken, backend="eager")
    compiled(X)
    with otp.profile() as prof:
        compiled(X)  # matmul, relu, add, sigmoid
        X.sin()
        prof.step()
        X.sin()
        prof.step()
        compiled(X)
        prof.step()
    assert roots(prof.spans()) == [(4, 0.8), (None, None), (4, 1.0)]
    duration = prof.spans()[0].attributes["torch.compile.captured_duration_share"]
    assert 0 < duration < 1


def test_what_runs_to_compile_is_not_counted():
    """The first call, which compiles, counts the same operators as the others."""
    compiled = torch.compile(broken, backend="eager")
    with otp.profile() as prof:
        compiled(X)
    assert roots(prof.spans()) == [(4, 1.0)]


def test_a_compiled_backward_pass():
    """What AOTAutograd's backward runs is captured, what the engine does besides is not."""
    weight = torch.ones(4, 4, requires_grad=True)
    compiled = torch.compile(lambda w: torch.relu(X @ w).sum(), backend="aot_eager")
    compiled(weight).backward()
    with otp.profile() as prof:
        compiled(weight).backward()
    names, parents = prof.names, prof.columns["parent"].tolist()
    rows = [names[name] for name in prof.columns["name"].tolist()]
    inside = sum(p >= 0 and rows[p] in {"CompiledFunction", "CompiledFunctionBackward"} for p in parents)
    ((captured, share),) = roots(prof.spans())
    assert captured == inside > 0
    assert share < 1


def test_steps_of_a_service():
    """The instrumentation says the same of its steps, also where a step is drained in parts."""
    exporter = InMemorySpanExporter()
    processor = otp.TorchSpanProcessor(exporter)
    compiled = torch.compile(broken, backend="eager")
    compiled(X)
    with instrumented(new_provider(processor), detail="ops") as instrumentor:
        instrumentor.step()  # else what is drained before the first one is in no step, unless the process has made optimizers
        for _ in range(3):
            compiled(X)
            processor.force_flush()
            X.sin()
            instrumentor.step()
    shares = [found for found in roots(exporter.get_finished_spans()) if found[0] is not None]
    assert [captured for captured, _ in shares] == [4, 4, 4]
    assert all(share < 1 for _, share in shares)
    assert not callback_handler.start_callbacks


def test_installed_in_the_middle_of_a_compilation():
    """A compilation that began before the callbacks were there is not told of, nor are graph breaks of before."""
    started = otp.profile()

    def backend(graph, _):
        started.start()
        return graph

    torch.compile(broken, backend="eager")(X)
    torch.compile(whole, backend=backend)(X)
    started.stop()
    assert not named(started, "TorchDynamo Compile")
    assert not named(started, "TorchDynamo Graph Break")


def _program():
    return len("program")


def test_calls_of_a_compilation_are_left_out():
    """What dynamo calls to compile is no part of the tree of calls, and what the program calls around it and after it is."""

    def failing(_graph, _inputs):
        raise RuntimeError("no backend")

    with otp.profile(with_stack=True) as prof:
        _program()
        torch.compile(whole, backend="eager")(torch.ones(2))
        _program()
        with pytest.raises(Exception, match="no backend"):
            torch.compile(data_dependent, backend=failing)(torch.ones(2))
        _program()
    names = [event.name for event in prof.events() if event.is_python_function]
    assert sum(name.endswith(": _program") for name in names) == 3
    assert sum(name == "<built-in function len>" for name in names) >= 3
    assert any("torch/_dynamo/convert_frame.py" in name and name.endswith(": __call__") for name in names)
    assert not any("torch/_dynamo/symbolic_convert.py" in name or name.endswith(": compile_inner") for name in names)


def test_stopped_in_the_middle_of_a_compilation():
    """A recording that ends while dynamo compiles leaves nothing behind: the next one has calls, on the same thread."""
    stopped = otp.profile(with_stack=True, operators=False)

    def backend(module, _inputs):
        stopped.stop()
        return module.forward

    stopped.start()
    torch.compile(whole, backend=backend)(X)
    with otp.profile(with_stack=True, operators=False) as prof:
        oct(7)
    assert "<built-in function oct>" in [event.name for event in prof.events()]
    assert not callback_handler.start_callbacks
