"""Labels inside torch.jit.trace: they come into the graph as torch's own do, and are recorded meanwhile as anywhere."""

from __future__ import annotations

import re
import threading
import warnings

import pytest

pytest.importorskip("torch", minversion="2.6")

import torch
from observed import succeeds

import otel_torchprof as otp

X = torch.ones(2)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def traced(function, **arguments):
    return torch.jit.trace(function, X, **arguments)


def nodes(graph):
    """A graph's text without where in the source things stand."""
    return re.sub(r" +#.*", "", str(graph))


def block(label):
    def function(x):
        with label("outer"):
            y = x + 1
            with label("inner", "args"):
                y = y * 2
        with label("outer"):
            return y.neg()

    return function


def decorated(label):
    @label("called", "args")
    def called(x):
        return x + 1

    return lambda x: called(called(x)) * 2


def generator(label):
    @label("generated")
    def generated(x):
        yield x + 1
        yield x + 2

    return lambda x: sum(generated(x))


def fail():
    raise ValueError


def raising(label):
    def function(x):
        try:
            with label("outer"), label("inner"):
                x = x + 1
                fail()
        except ValueError:
            return x * 2

    return function


def again(label):
    """One object inside itself."""
    own = label("own")

    def function(x):
        with own:
            x = x + 1
            with own:
                return x * 2

    return function


@pytest.mark.parametrize("program", [block, decorated, raising])
def test_the_graph_is_that_of_torchs_label(program):
    """A function with our labels is traced into the same graph as with torch's, also where a block is left by an exception."""
    ours, torchs = (traced(program(label)) for label in (otp.record_function, torch.profiler.record_function))
    assert "_record_function_enter_new" in str(torchs.graph)
    assert nodes(ours.graph) == nodes(torchs.graph)


def test_methods_of_a_module_and_named_arguments():
    """Both ways in which torch traces modules have the labels, and so does a function that is traced with named arguments."""

    class Module(torch.nn.Module):
        @otp.record_function("forward")
        def forward(self, x):
            with otp.record_function("inside"):
                return x + 1

    for graph in (
        traced(Module()).graph,
        torch.jit.trace(Module(), example_kwarg_inputs={"x": X}).graph,
        torch.jit.trace(block(otp.record_function), example_kwarg_inputs={"x": X}).graph,
    ):
        assert (
            str(graph).count("_enter_new") == str(graph).count("_record_function_exit") == 2 + ("outer" in str(graph))
        )


@pytest.mark.parametrize("program", [generator, again])
def test_every_label_that_begins_also_ends(program):
    """The graph ends what it begins where one object is inside itself, and where a generator takes turns with its caller."""
    graph = str(traced(program(otp.record_function)).graph)
    assert graph.count("_enter_new") == graph.count("_record_function_exit") == 2 - (program is generator)


def test_it_is_recorded_whenever_the_traced_function_runs(tmp_path):
    """Each run of what was traced has the labels, for us and for torch's profiler; it can be saved."""
    function = traced(block(otp.record_function))
    function.save(str(tmp_path / "traced.pt"))
    for run in (function, torch.jit.load(str(tmp_path / "traced.pt"))):
        for profile in (otp.profile, torch.profiler.profile):
            with profile() as prof:
                run(X)
            labels = [event for event in prof.events() if event.name in {"outer", "inner"}]
            assert [event.name for event in labels] == ["outer", "inner", "outer"]
            assert labels[1].cpu_parent is labels[0]


def test_it_is_recorded_once_while_it_is_traced():
    """While a function is traced its labels are recorded as at any other time: once each, errors and all, without operators too."""
    for operators in (True, False):
        with otp.profile(operators=operators) as prof:
            traced(raising(otp.record_function), check_trace=False)
        labels = [span for span in prof.spans() if span.name in {"outer", "inner"}]
        assert sorted(span.name for span in labels) == ["inner", "outer"]
        assert {span.attributes["error.type"] for span in labels} == {"ValueError"}


def test_labels_around_a_trace_stay_out_of_it():
    """A label that was entered before the trace is no part of the graph, though it is left in the middle or entered again there."""
    around = otp.record_function("around")
    early = otp.record_function("early")

    def function(x):
        early.__exit__(None, None, None)
        with around:
            return x + 1

    with otp.profile() as prof, around:
        early.__enter__()
        graph = str(traced(function, check_trace=False).graph)
        with otp.record_function("after"):
            pass
    assert graph.count("_enter_new") == graph.count("_record_function_exit") == 1
    assert "early" not in graph
    assert [event.name for event in prof.events() if event.is_user_annotation] == ["around", "early", "around", "after"]


def test_other_threads_are_not_traced():
    """Labels of other threads stay out of the graph, those of the same object too, and are recorded."""
    shared = otp.record_function("shared")
    entered, left = threading.Event(), threading.Event()

    def elsewhere():
        with otp.record_function("elsewhere"), shared:
            entered.set()
            left.wait(60)

    def function(x):
        thread.start()
        entered.wait(60)
        with shared:
            x = x + 1
        left.set()
        thread.join()
        return x

    thread = threading.Thread(target=elsewhere)
    with otp.profile(all_threads=True) as prof:
        graph = str(traced(function, check_trace=False).graph)
    assert "elsewhere" not in graph
    assert graph.count("_enter_new") == graph.count("_record_function_exit") == 1
    names = sorted(event.name for event in prof.events() if event.is_user_annotation)
    assert names == ["elsewhere", "shared", "shared"]


def test_a_trace_that_fails_leaves_nothing():
    """An exception that leaves a traced function ends its labels; the next trace has its own, and none comes in between."""

    def function(x):
        otp.record_function("left open").__enter__()
        with otp.record_function("failing"):
            raise KeyError(x)

    with otp.profile() as prof:
        with pytest.raises(KeyError):
            traced(function)
        with otp.record_function("between"):
            pass
        graph = nodes(traced(block(otp.record_function), check_trace=False).graph)
    assert graph == nodes(traced(block(torch.profiler.record_function)).graph)
    assert "between" in [event.name for event in prof.events()]


def test_a_name_that_is_no_utf8_is_traced():
    """The halves of characters, which torch's graph does not take, are question marks there."""

    def function(x):
        with otp.record_function("name\ud800"):
            return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert 'value="name?"' in str(traced(function).graph)


TORCH_LATER = """
import warnings
warnings.simplefilter("ignore")
import otel_torchprof as otp
with otp.record_function("before"):
    import torch
def function(x):
    with otp.record_function("label"):
        return x + 1
assert "_record_function_enter_new" in str(torch.jit.trace(function, torch.ones(2)).graph)
"""


def test_torch_may_come_later():
    """Labels come into graphs of a torch that is imported after the package."""
    succeeds(TORCH_LATER, has_torch=False)


FAILING = """
from otel_torchprof._native import python_sources
import otel_torchprof as otp
def fails(label, begins):
    raise OSError(label.name)
python_sources.show_labels(fails)
def function(x):
    with otp.record_function("label"):
        return x + 1
with otp.profile(operators=False) as prof:
    assert python_sources.traced(function, x=2) == 3
    with otp.record_function("after"):
        pass
assert [event.name for event in prof.events()] == ["label", "after"]
assert python_sources.errors() == 4
"""


def test_the_program_gets_no_error_of_the_graphs():
    """What raises while a label is added to a graph is counted, and the traced function continues."""
    succeeds(FAILING, has_torch=False)
