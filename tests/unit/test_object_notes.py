"""What the tracer notes of functions, and whose facts hold where several recordings are one batch. No torch."""

import gc
import sys
import threading
import weakref
from types import FunctionType

import pytest

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.frame_info import (
    FrameInfo,
    FunctionInfo,
    ModuleInfo,
    OptimizerInfo,
    ParameterGroupInfo,
    ParameterInfo,
    TensorInfo,
)
from otel_torchprof._columns.joined import joined, without
from otel_torchprof._native.object_notes import ObjectNotes
from otel_torchprof._profile.events import EventList

FRAME = 4


class Outer:
    """Has a method."""

    def method(self):
        """Has a function inside."""

        def inner():
            return 1

        return inner


@pytest.mark.parametrize(
    ("function", "module", "name", "before_3_11"),
    [
        (Outer.method, "pkg.mod", "pkg.mod.Outer.method", "pkg.mod.method"),
        (Outer().method(), "pkg.mod", "pkg.mod.Outer.method.<locals>.inner", "pkg.mod.inner"),
        (lambda: 0, "__main__", "__main__.<lambda>", "__main__.<lambda>"),
        (Outer.method, None, "Outer.method", "method"),
    ],
)
def test_functions(function, module, name, before_3_11):
    """A function is known by its qualified name behind its module, its file and its first line."""
    notes, code = ObjectNotes(), function.__code__
    notes.add_code((7, code, module))
    expected = name if sys.version_info >= (3, 11) else before_3_11
    assert dict(notes.finish().functions) == {7: FunctionInfo(expected, __file__, code.co_firstlineno)}


class Calls:
    """Calls another module as garbage."""

    def __init__(self, notes, number):
        self.notes, self.number, self.itself = notes, number, self

    def __del__(self):
        self.notes.add_module(self.number, Module())


class Module:
    """Looks like one of torch's."""

    def __init__(self):
        self._modules, self._parameters = {}, {}


def test_modules_that_are_called_while_info_are_taken():
    """A collection of garbage may begin while facts are taken, and its finalizers may call modules."""
    notes, module, many = ObjectNotes(), Module(), 10_000  # more than there are tuples to be had without an allocation
    for number in range(many):
        notes.add_module(number, module)
    before = gc.get_threshold()
    for number in range(many, many + 5):
        Calls(notes, number)
        gc.set_threshold(3000)
        try:
            found = notes.info()
        finally:
            gc.set_threshold(*before)
        assert {*range(many)} <= {*found.modules}
    gc.collect()
    assert len(notes.info().modules) == many + 5


def test_first_function_of_a_name_has_it():
    """Of two functions that have one name the first that was called is told of."""
    notes = ObjectNotes()
    notes.add_code((7, Outer.method.__code__, "first"))
    notes.add_code((7, Outer.method.__code__, "second"))
    assert notes.finish().functions[7].qualified_name.startswith("first.")


def test_info_go_on_after_they_were_read():
    """What was read stays as it is, and a later reading has what has come since too."""
    notes = ObjectNotes()
    notes.add_code((1, Outer.method.__code__, "first"))
    before = notes.info()
    notes.add_code((2, Outer.method.__code__, "second"))
    assert list(before.functions) == [1]
    assert list(notes.finish().functions) == [1, 2]
    assert 2 not in before.functions
    assert (1 in before.functions, len(before.functions), before.functions.get(2)) == (True, 1, None)


def test_no_function_is_kept():
    """After the end no code is alive that was noted, and what is known of it is there still."""
    notes = ObjectNotes()
    function = FunctionType(compile("def f(): return 1", "some file", "exec").co_consts[0], {})
    code = weakref.ref(function.__code__)
    notes.add_code((1, function.__code__, "m"))
    del function
    info = notes.finish()
    assert code() is None
    assert info.functions[1] == FunctionInfo("m.f", "some file", 1)


def test_several_threads_note_and_read():
    """Nothing that threads note at the same time is lost, whoever reads meanwhile."""
    notes, code = ObjectNotes(), Outer.method.__code__
    begin = threading.Barrier(4)

    def note(first):
        begin.wait(60)
        for number in range(first, first + 2000):
            notes.add_code((number, code, "m"))

    threads = [threading.Thread(target=note, args=(first,)) for first in (0, 2000, 4000)]
    for thread in threads:
        thread.start()
    begin.wait(60)
    while any(thread.is_alive() for thread in threads):
        notes.info()
    for thread in threads:
        thread.join()
    assert sorted(notes.finish().functions) == list(range(6000))


@pytest.mark.parametrize("what", [None, 3, object()])
def test_what_is_no_module_and_no_optimizer_is_left_out(what):
    """Nothing is raised for objects of another kind, and nothing is told of them."""
    notes = ObjectNotes()
    notes.add_module(1, what)
    notes.add_optimizer(1, what)
    info = notes.finish()
    assert (dict(info.modules), dict(info.optimizers)) == ({}, {})


def _module(name):
    return ModuleInfo(name, "Net", "m.Linear", ())


def _batch(start, info):
    """Two calls and an operator of a recording that starts at a time."""
    columns = {
        "start": [start, start + 1, start + 2],
        "end": [start + 9, start + 8, start + 3],
        "name": [1, 2, 3],
        "kind": [FRAME, FRAME, 1],
        "parent": [-1, 0, 1],
        "fwd_thread": [0, 5, 5],
    }
    return Batch.of(columns, ["", "nn.Module: Linear_0", "f", "aten::f"], frame_info=info)


def _info(start, name, lr):
    function = FunctionInfo("m.f", "m.py", 1)
    return FrameInfo({2: function, 3: function}, {1: _module(name)}, {5: OptimizerInfo(lr, ())}, start)


def test_a_name_means_the_module_of_its_recording():
    """Each call of a batch of several recordings has the facts of its own recording, though the names are the same."""
    batches = [_batch(100, _info(100, "a", "one")), _batch(200, None), _batch(300, _info(300, "b", "two"))]
    whole = joined([joined(batches[:2]), *batches[2:]])
    events = EventList.of(whole, origin_ns=0)
    calls, called, operators = (
        [event for event in events if event.name == name and event.is_python_function is is_call]
        for name, is_call in (("nn.Module: Linear_0", True), ("f", True), ("aten::f", False))
    )
    assert [call.module and call.module.qualified_name for call in calls] == ["a", "a", "b"]
    assert [call.optimizer.class_name for call in called] == ["one", "one", "two"]
    assert {call.function for call in called} == {FunctionInfo("m.f", "m.py", 1)}
    assert {(event.function, event.module, event.optimizer) for event in operators} == {(None, None, None)}
    assert whole.frame_info.modules[1].qualified_name == "b"
    assert whole.frame_info.functions[2] == FunctionInfo("m.f", "m.py", 1)
    assert [module.qualified_name for module in whole.frame_info.all_modules()] == ["a", "b"]


def test_what_has_changed_between_recordings_is_listed_once():
    """Gradients and learning rates of two cycles differ: their module and its optimizer are one each, as in the first cycle."""

    def cycle(start, gradient, rate):
        weight, grad = (
            TensorInfo((2,), (1,), "torch.float32", "torch.strided", "cpu", address, address)
            for address in (8, gradient)
        )
        parameter = ParameterInfo("weight", "torch.nn.parameter.Parameter", True, weight, grad)
        group = ParameterGroupInfo({"lr": rate}, (parameter,))
        modules, optimizers = {1: ModuleInfo("a", "Net", "Linear", (parameter,))}, {5: OptimizerInfo("SGD", (group,))}
        return FrameInfo({}, modules, optimizers, start)

    first, second = cycle(100, 16, 0.1), cycle(200, 24, 0.2)
    whole = FrameInfo.joined([first, second])
    assert whole.all_modules() == (first.modules[1],)
    assert whole.all_optimizers() == (first.optimizers[5],)
    assert whole.at(250).optimizers[5].groups[0].hyperparameters == {"lr": 0.2}


def test_joined_info_of_none():
    """Recordings without calls have no facts together either; of one with facts they are its own."""
    info = _info(100, "a", "one")
    assert joined([_batch(100, None), _batch(200, None)]).frame_info is None
    assert joined([_batch(100, info), _batch(200, None)]).frame_info is info


def test_info_stay_with_what_is_left_of_a_batch():
    """A batch without some of its rows has the facts still."""
    batch = _batch(100, _info(100, "a", "one"))
    assert without(batch, batch["kind"] == 1).frame_info is batch.frame_info
