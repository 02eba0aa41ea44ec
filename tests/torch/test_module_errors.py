"""Calls of modules that do not end as they should: exceptions, interrupts, hooks that fail."""

from __future__ import annotations

import queue

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from module_events import NET, Net, installed, recorded  # noqa: E402
from torch import nn  # noqa: E402

from otel_torchprof._native.ffi import python_sources  # noqa: E402

X = torch.ones(2, 4)


@pytest.fixture
def hooks():
    """Calls of every module are followed."""
    with installed() as every:
        yield every


def test_a_module_that_raises(hooks):
    """Modules that an exception leaves are marked with its class; the next call is as if nothing had been."""
    model = Net()
    model.encoder.layers[1].forward = lambda _: (_ for _ in ()).throw(ZeroDivisionError)

    def body():
        with pytest.raises(ZeroDivisionError):
            model(X)
        del model.encoder.layers[1].forward
        model(X)

    failed = [f"{line} !ZeroDivisionError" for line in ("Net", "  encoder", "    encoder.layers.1")]
    assert recorded(body) == [*failed[:2], NET[2], failed[2], *NET]


class Broken(nn.Module):
    """Raises an exception whose class is in a module."""

    def forward(self, _):
        raise queue.Empty


def test_the_class_of_an_exception_is_qualified(hooks):
    """The class is named with its module, as error.type wants it; no exception is left over for the next module."""

    def body():
        with pytest.raises(queue.Empty):
            Broken()(X)
        ReturnsNone()(X)

    assert recorded(body) == ["Broken !_queue.Empty", "ReturnsNone"]


class ReturnsNone(nn.Module):
    def forward(self, _):
        return None


def test_no_output_is_no_error(hooks):
    """A module that returns None has no error, also when it is called while an exception is being handled."""

    def body():
        ReturnsNone()(X)
        try:
            {}["missing"]
        except KeyError:
            ReturnsNone()(X)
            with pytest.raises(queue.Empty):
                Broken()(X)

    assert recorded(body) == ["ReturnsNone", "ReturnsNone", "Broken !_queue.Empty"]


class Interrupted(nn.Module):
    """Is left by what is no Exception."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.forward = self.interrupt
        self.interrupted = True

    def interrupt(self, x):
        if self.interrupted:
            raise KeyboardInterrupt
        return x.neg()

    def forward(self, x):
        return self.inner(x)


def test_an_interrupt(hooks):
    """A module that an interrupt leaves is unfinished, and the next one is not inside it; as deep and less deep."""
    model, other = Interrupted(), nn.ReLU()

    def interrupt():
        with pytest.raises(KeyboardInterrupt):
            model(X)

    def body():
        interrupt()
        model.interrupted = False
        model(X)
        model.interrupted = True
        interrupt()
        other(X)

    unfinished = ["Interrupted ...", "  inner ..."]
    assert recorded(body) == [*unfinished, "Interrupted", "  inner", *unfinished, "ReLU"]


def test_deeper_after_an_interrupt(hooks):
    """A model that is called deeper in the stack than where an interrupt left it is not taken to be inside it."""
    model = Interrupted()
    deeper = torch.no_grad()(lambda function: max([X], key=lambda x: function(x).sum()))

    def body():
        with pytest.raises(KeyboardInterrupt):
            model(X)
        model.interrupted = False
        deeper(model)

    assert recorded(body) == ["Interrupted ...", "  inner ...", "Interrupted", "  inner"]


def test_an_interrupt_below_a_module(hooks):
    """A module that is called after its caller caught an interrupt of another one is its caller's child."""

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Interrupted(), nn.ReLU()

        def forward(self, x):
            try:
                self.first(x)
            except KeyboardInterrupt:
                return self.second(x)

    tree = ["Catches", "  first ...", "    first.inner ...", "  second"]
    assert recorded(lambda: Catches()(X)) == tree


def test_interrupts_one_after_another(hooks):
    """A module that an interrupt leaves does not hide those that come after it."""
    model = Interrupted()

    def body():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model(X)

    assert recorded(body) == ["Interrupted ...", "  inner ..."] * 2


def test_hooks_of_the_program(hooks):
    """Hooks of the program's own run as ever, inside the event; what one of them raises is the error of its module."""
    model, seen = Net(), []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    handle = model.register_forward_hook(lambda *_: seen.append("after"))

    def fail(*_):
        raise ValueError("a hook's")

    assert recorded(lambda: model(X)) == NET
    assert seen == ["before", "after"]
    handle.remove()
    model.encoder.register_forward_hook(fail)
    with pytest.raises(ValueError, match="a hook's"):
        model(X)

    def body():
        with pytest.raises(ValueError, match="a hook's"):
            model(X)
        nn.Identity()(X)

    assert recorded(body) == ["Net !ValueError", "  encoder !ValueError", *NET[2:4], "Identity"]


def test_a_model_that_cannot_be_walked_over(hooks):
    """A model whose children cannot be listed runs as ever and is no event; that is counted."""

    class Refusing:
        def items(self):
            raise RuntimeError("none of your business")

    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.__dict__["_modules"] = Refusing()

        def forward(self, x):
            return x + 1

    before = python_sources.errors()
    model = Opaque()
    assert recorded(lambda: torch.testing.assert_close(model(X), X + 1)) == []
    assert python_sources.errors() == before + 1
