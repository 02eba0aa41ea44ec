"""Public names in functions that torch.compile compiles: they raise nowhere where torch's equivalents do not."""

from __future__ import annotations

import contextlib

import pytest
from providers import instrumented

torch = pytest.importorskip("torch", minversion="2.6")

import otel_torchprof as otp  # noqa: E402
from otel_torchprof import dynamo, legacy  # noqa: E402


def block(x, names, _made):
    with names.profile(record_shapes=True, schedule=names.schedule(wait=0, warmup=1, active=1)) as prof:
        y = x * 2
        prof.step()
    return y


def plain_block(x, names, _made):
    with names.profile():
        return x * 2


def start_stop(x, names, _made):
    prof = names.profile()
    prof.start()
    y = x * 2
    prof.stop()
    return y


def read(x, names, _made):
    with names.profile() as prof:
        y = x * 2
    prof.key_averages()
    prof.events()
    return y


def made_before(x, _names, made):
    with made.profile:
        return x * 2


def started_before(x, _names, made):
    made.running.step()
    made.running.add_metadata("key", "value")
    return x * 2


def label(x, names, _made):
    with names.record_function("label", "argument"):
        return x * 2


def label_made_before(x, _names, made):
    with made.label:
        return x * 2


def decorated(x, _names, made):
    return made.decorated(x)


def choices(x, names, _made):
    names.schedule(wait=1, warmup=1, active=1)(2)
    names.supported_activities()
    names.tensorboard_trace_handler("unused")
    return x * 2


class Made:
    """What is made before the code is compiled."""

    def __init__(self, names):
        self.profile, self.running = names.profile(), names.profile()
        self.label = names.record_function("label")
        self.decorated = names.record_function("decorated")(lambda x: x * 2)
        self.running.start()


def outcome(function, names, *, fullgraph):
    """What comes of a compiled function, twice: the result, or that it was not to be compiled as a whole."""
    torch._dynamo.reset()
    made = Made(names)
    compiled = torch.compile(lambda x: function(x, names, made), backend="eager", fullgraph=fullgraph)
    try:
        return [compiled(torch.ones(2)).tolist() for _ in range(2)]
    except torch._dynamo.exc.Unsupported:
        return "unsupported"
    finally:
        with contextlib.suppress(AssertionError):
            made.running.stop()


AS_TORCHS = (
    block,
    plain_block,
    start_stop,
    read,
    made_before,
    started_before,
    label,
    label_made_before,
    decorated,
    choices,
)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("function", AS_TORCHS, ids=lambda function: function.__name__)
def test_as_torchs(function, fullgraph):
    """What torch's profiler does in compiled code without an error, ours does: what cannot be in a graph is called beside it."""
    if outcome(function, torch.profiler, fullgraph=fullgraph) == [[2.0, 2.0]] * 2:
        assert outcome(function, otp, fullgraph=fullgraph) == [[2.0, 2.0]] * 2


def stepped(x, _path):
    with instrumented(sigterm_timeout=0) as instrumentor:
        y = x * 2
        instrumentor.step({"torch.step.loss": 1.5})
        instrumentor.keep_step()
        instrumentor.health  # noqa: B018 - it is asked for
    return y


def streamed(x, path):
    with otp.stream(otp.OTLPFileExporter(path / "spans.jsonl")):
        return x * 2


def legacy_profile(x, _path):
    with legacy.profile():
        return x * 2


def dynamo_profiler(x, _path):
    profiler = dynamo.Profiler()
    with profiler.prof:
        y = x * 2
    profiler.results()
    return y


def results(x, path):
    with otp.profile(with_stack=True) as prof:
        y = x * 2
    prof.health  # noqa: B018 - it is asked for
    prof.columns  # noqa: B018 - as above
    prof.export_chrome_trace(path / "trace.json")
    return y


def labels_and_ranges(x, _path):
    with otp.label_functions(["json:dumps"]), otp.emit_itt():
        return otp.carry(lambda: x * 2)()


def others(x, _path):
    otp.step_context(rank=0, step=1)
    otp.rank_resource()
    otp.demangle("_Z1fv")
    otp.SpanPolicy()
    otp.FrameFilter()
    otp.KinetoStepTracker.increment_step("loop")
    return x * 2


OWN = (stepped, streamed, legacy_profile, dynamo_profiler, results, labels_and_ranges, others)


@pytest.mark.parametrize("function", OWN, ids=lambda function: function.__name__)
def test_own(function, tmp_path):
    """Names that torch does not have break a graph in compiled code and do there what they do elsewhere."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x, tmp_path), backend="eager")
    assert [compiled(torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
