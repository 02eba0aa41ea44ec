"""Contexts of torch's own threads: work that autograd or jit.fork runs elsewhere has the context that asked for it."""

from __future__ import annotations

import threading

import pytest
from forked import in_child
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")

from fake_contexts import FakeContexts  # noqa: E402
from odd_programs import Nested, scripted_fork  # noqa: E402

from otel_torchprof._columns.schema import Kind  # noqa: E402
from otel_torchprof._native import torch_library  # noqa: E402
from otel_torchprof._native.recorder import CONTEXT_MUTED, Session  # noqa: E402

X = torch.ones(3)
TELLS = pytest.mark.parametrize("elsewhere", [0, 1 << 40], ids=["source-cannot-tell", "source-says-none"])
"""Torch's threads may or may not have run Python before."""


def followed(body, contexts, *, inputs=False):
    """Runs ``body`` for a session that follows contexts; its batch."""
    session = Session(1 << 24, all_threads=True, contexts=True, kinds=[Kind.OPERATOR], inputs=inputs)
    library = torch_library.load()
    with contexts.installed():
        session.start()
        observation = library.observe(session)
        try:
            body()
        finally:
            observation.stop()
            session.stop()
    return session.final_batch()


def contexts_of(batch, name):
    """Contexts and threads of the events with that name."""
    rows = [row for row, index in enumerate(batch["name"].tolist()) if batch.names[index] == name]
    return batch["context"][rows].tolist(), {batch.threads[index].ident for index in batch["thread"][rows]}


def _forked(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


@pytest.fixture(scope="module")
def forks():
    """A TorchScript function whose cosine runs on a thread of torch's."""
    function = scripted_fork(_forked)
    for _ in range(3):
        function(X)
    return function


@TELLS
def test_jit_fork_takes_the_context_along(forks, elsewhere):
    """What jit.fork runs on a thread of torch's has the context of the fork, each time anew; left contexts are over."""
    contexts = FakeContexts(elsewhere)

    def body():
        for context in (0, 5, 6, 0, CONTEXT_MUTED, 7):
            contexts.enter(context)
            forks(X)

    found, threads = contexts_of(followed(body, contexts), "aten::cos")
    assert sorted(found) == [0, 0, 5, 6, 7]
    assert threading.get_ident() not in threads


@TELLS
def test_threads_of_the_engine_have_the_context_of_backward(elsewhere):
    """Backward functions on threads of autograd's belong to the span that called backward(), one call after another."""
    contexts = FakeContexts(elsewhere)

    def body():
        for context in (5, 0, 6):
            contexts.enter(context)
            Nested.apply(torch.ones(3, requires_grad=True), 70).sum().backward()

    found, threads = contexts_of(followed(body, contexts), "aten::cos")
    assert sorted(found) == [0] * 71 + [5] * 71 + [6] * 71
    assert len(threads) > 1


def test_a_source_that_runs_operators():
    """What the source runs while it is asked is left out, and leaves the inputs of the operator around it alone."""
    large, small = torch.ones(7, 5, 3), torch.ones(2, 3)
    contexts = FakeContexts(inside=large.exp)

    def body():
        contexts.enter(5)
        small.cos()

    batch = followed(body, contexts, inputs=True)
    names = [batch.names[index] for index in batch["name"].tolist()]
    assert "aten::exp" not in names
    words = batch.inputs[batch["inputs"][names.index("aten::cos")] :]
    assert words[[0, 2, 3]].tolist() == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_no_context_of_its_parents():
    """What the parent's threads carried means nothing in the child, whose threads have other numbers."""
    said = []

    def child(contexts):
        contexts.enter(0)
        return contexts_of(followed(X.tan, contexts), "aten::tan")[0]

    def parent():  # on a thread that is not the first: the child's only thread is
        contexts = FakeContexts()
        contexts.enter(5)

        def body():
            X.cos()
            said.append(in_child(lambda: child(contexts)))

        said.append(contexts_of(followed(body, contexts), "aten::cos")[0])

    in_threads(parent)
    assert said == ["[0]", [5]]
