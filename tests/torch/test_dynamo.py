"""What torch.compile captures: torch's classes beside ours, and compiled models with graph breaks."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from torch._dynamo import profiler as reference  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof import dynamo  # noqa: E402
from otel_torchprof._profile.dynamo import _print_once as print_once  # noqa: E402

NUMBERS = [(0.0, 0, 0, 0), (12.5, 3, 2, 1), (7.25, 40, 39, 5), (1e6, 1, 0, 2), (0.5, 2, -1, 3)]
X = torch.ones(4, 4)


@pytest.fixture(autouse=True)
def fresh():
    """Each test compiles anew and counts from nothing."""
    torch._dynamo.reset()
    dynamo.Profiler.unique_graphs = 0
    yield
    torch._dynamo.reset()


def broken(x):
    """Two graphs, with an operator that no graph has between them."""
    x = torch.relu(x @ x)
    not_captured(x)
    return (x + 1).sigmoid()


@torch._dynamo.disable
def not_captured(x):
    return x.cos()


def texts(metrics):
    """All that can be read of metrics."""
    return str(metrics), metrics.tocsv(), repr(metrics)


@pytest.mark.parametrize(("one", "other"), list(itertools.product(NUMBERS, NUMBERS)))
def test_metrics_calculate_as_torchs(one, other):
    """Sums, sums in place, quotients by metrics and by numbers: the same numbers, texts and lists as torch's own class."""

    def outcomes(kind):
        grown = kind(*one)
        grown += kind(*other)
        results = (kind(*one) + kind(*other), grown, kind(*one) / kind(*other), kind(*one) / 3, kind(*one) / 0, kind())
        return [texts(result) for result in results]

    assert outcomes(dynamo.ProfileMetrics) == outcomes(reference.ProfileMetrics)


def test_metrics_take_nothing_else():
    """What is no metrics cannot be added; the error is torch's, also in its text."""
    errors = []
    for kind in (dynamo.ProfileMetrics, reference.ProfileMetrics):
        with pytest.raises(AssertionError) as caught:
            kind() + 1
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(("one", "other"), list(itertools.product(NUMBERS, NUMBERS)))
def test_results_calculate_as_torchs(one, other):
    """Results have torch's percentages, texts and lists, alone and added up: the calls of graphs are not."""

    def outcomes(module):
        def result():
            return module.ProfileResult(module.ProfileMetrics(*one), module.ProfileMetrics(*other), 7)

        total = result()
        total += module.ProfileResult(module.ProfileMetrics(*other), module.ProfileMetrics(*one), 2)
        return [(str(r), r.tocsv(), texts(r.percent()), r.unique_graphs) for r in (result(), total)]

    assert outcomes(dynamo) == outcomes(reference)


@pytest.mark.parametrize("torch_labels", [False, True])
def test_counts_are_true(torch_labels, monkeypatch):
    """Graphs, their calls, operators captured and in all, with a graph break; also while torch labels what it compiles."""
    profiler = dynamo.Profiler()
    compiled = torch.compile(broken, backend=dynamo.fx_insert_profiling)
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", torch_labels)
    with profiler.prof:
        for _ in range(3):
            compiled(X)
    result = profiler.results()
    assert result.tocsv()[:4] == [2, 6, 12, 15]
    assert (result.captured.fusions, result.total.fusions) == (6, 14)
    assert 0 < result.percent().microseconds < 1
    assert str(result).startswith(" 2 graphs  6 graph calls   12/  15 =  80% ops")
    assert profiler.results().unique_graphs == 0


def test_times_are_those_of_the_operators():
    """The times are sums over the outermost operators, in microseconds."""
    profiler = dynamo.Profiler()
    with profiler.prof:
        X.cos()
        X @ X
    tops = [event for event in profiler.prof.events() if event.cpu_parent is None]
    result = profiler.results()
    assert result.total.operators == len(tops) == 2
    assert result.total.microseconds == pytest.approx(sum(event.time_range.elapsed_us() for event in tops))
    assert (result.captured.operators, result.captured.microseconds, result.captured.graphs) == (0, 0, 0)


def test_labels_and_modules_are_no_operators():
    """Labels of both kinds and modules are looked through: what is in them counts, they do not."""
    profiler = dynamo.Profiler()
    profiler.prof = otp.profile(with_modules=True)
    with (
        profiler.prof,
        otp.record_function("ours"),
        torch.profiler.record_function("torch's"),
    ):
        torch.nn.ReLU()(X)
    assert profiler.results().total.operators == 1


def test_torch_s_own_backend_counts_too():
    """Graphs under torch's label of that name, from its own backend, are captured like ours."""
    profiler = dynamo.Profiler()
    compiled = torch.compile(broken, backend=reference.fx_insert_profiling)
    with profiler.prof:
        compiled(X)
    assert profiler.results().tocsv()[1:4] == [2, 4, 5]


def test_missing_operators_are_printed_once(monkeypatch, capsys):
    """With TORCHDYNAMO_PRINT_MISSING=1 each operator that no graph has is printed, once; else none is."""
    print_once.cache_clear()
    profiler = dynamo.Profiler()
    compiled = torch.compile(broken, backend=dynamo.fx_insert_profiling)
    with profiler.prof:
        compiled(X)
        compiled(X)
        X.sin()
    profiler.results()
    assert not capsys.readouterr().out
    monkeypatch.setenv("TORCHDYNAMO_PRINT_MISSING", "1")
    profiler.results()
    profiler.results()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.rpartition(" ")[2] for line in lines) == ["aten::cos", "aten::sin"]
    assert all(line.startswith("MISSING ") for line in lines)


@pytest.mark.parametrize(
    "stack",
    [
        ["a.py(1): f", "b.py(2): g", "c.py(3): h", "d.py(4): i"],
        ["a.py(1): f", "<built-in method run>", "x/site-packages/torch/nn/modules/module.py(1): _call_impl"],
        ["x/torch/autograd/profiler.py(1): __enter__", "a.py(1): other"],
        [],
    ],
)
def test_stacks_are_printed_as_torch_prints_them(stack, capsys):
    """Of a stack the last three entries of the program's own are printed; the profiler's own operators are not; twice is once."""
    print_once.cache_clear()
    torch._dynamo.utils.warn_once_cache.clear()
    getattr(reference.print_once, "cache_clear", lambda: None)()
    dynamo.print_missing(stack)
    dynamo.print_missing(stack)
    ours = capsys.readouterr().out
    reference.print_missing(stack)
    assert ours == capsys.readouterr().out


@pytest.mark.parametrize("value", ["1", "0", "", "true", None])
def test_when_missing_ones_are_printed(value, monkeypatch):
    """The variable has to be 1, as for torch."""
    monkeypatch.delenv("TORCHDYNAMO_PRINT_MISSING", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCHDYNAMO_PRINT_MISSING", value)
    assert dynamo.should_print_missing() == reference.should_print_missing()
