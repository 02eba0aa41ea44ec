"""Modules that running functions hold: what is found where torch's hooks for all modules cannot be used."""

from __future__ import annotations

import sys
import threading
import weakref

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from instrumented import Collecting  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from torch import nn  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._sources.frame_modules import modules_of  # noqa: E402

X = torch.ones(2, 4)


class Trainer:
    """Has its model as others have."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def found(self):
        return modules_of(sys._getframe())


def test_where_modules_are_found():
    """In variables, attributes of objects, lists and dicts of the functions of a stack; parts of a module are none."""
    alone, listed, named = nn.Linear(4, 4), nn.ReLU(), nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    layer, models, by_name = model[0], [listed], {"named": named}
    found = Trainer(model=model, teacher=alone).found()
    assert {id(module) for module in found} >= {id(module) for module in (alone, listed, named, model)}
    assert id(layer) not in {id(module) for module in found}
    assert (models, by_name) == ([listed], {"named": named})


def test_nothing_inside_of_a_module_is_looked_at():
    """What a module's own functions hold are no roots: the stack is looked at up to the call of the outermost one."""
    seen = []

    class Model(nn.Module):
        def forward(self, x):
            hidden = nn.Tanh()
            seen.extend(modules_of(sys._getframe()))
            return hidden(x)

    model = Model()
    model(X)
    assert id(model) in {id(module) for module in seen}
    assert not any(isinstance(module, nn.Tanh) for module in seen)


def test_no_code_of_the_programs_runs():
    """Objects with attributes that are made when they are asked for, or with none, are left alone."""

    class Hostile:
        __slots__ = ()

        def __getattribute__(self, name):
            raise AssertionError(name)

    hostile, number = Hostile(), 7
    assert not any(isinstance(module, Hostile) for module in Trainer().found())
    assert number == 7
    assert type(hostile) is Hostile


def test_what_a_function_deletes_is_freed():
    """Nothing that was in its variables lives longer because these were looked at, but in a dictionary that the program has."""
    model = nn.Linear(4, 4)
    deleted = weakref.ref(model)
    assert id(model) in {id(module) for module in modules_of(sys._getframe())}
    del model
    assert deleted() is None
    model = nn.Linear(4, 4)
    variables = locals()
    modules_of(sys._getframe())
    assert variables["model"] is model


def test_a_stack_that_is_not_there():
    """Of a thread that has ended there is nothing."""
    assert modules_of(None) == []


def test_a_loop_after_something_was_compiled():
    """A training loop that begins after torch has compiled something has forward passes after a few steps, and no hook of all modules."""
    torch.compile(lambda x: x + 1, backend="eager")(X)
    exporter, stop = Collecting(), threading.Event()
    provider = TracerProvider(shutdown_on_exit=False)
    processor = otp.TorchSpanProcessor(exporter)
    provider.add_span_processor(processor)
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="steps")
    trainer = Trainer(model=nn.Linear(4, 4))
    optimizer = torch.optim.SGD(trainer.model.parameters(), 0.1)

    def fit(self):
        while not stop.is_set():
            optimizer.zero_grad()
            self.model(X).sum().backward()
            optimizer.step()

    thread = threading.Thread(target=fit, args=(trainer,))
    thread.start()
    try:
        while not any(span.name == "torch.phase.forward" for span in exporter.spans):
            assert provider.force_flush()
            assert not torch.nn.modules.module._global_forward_pre_hooks
    finally:
        stop.set()
        thread.join()
        otp.TorchInstrumentor().uninstrument()
        provider.shutdown()
        torch._dynamo.reset()
    assert not trainer.model._forward_pre_hooks
