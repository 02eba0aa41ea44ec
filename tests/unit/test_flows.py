"""Pairs of forward operators and backward functions."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import Kind, Scope
from otel_torchprof._model.flows import forward_backward

THREADS = (RecordedThread(11, 1, 1), RecordedThread(12, 2, 2), RecordedThread(13, 3, 0))
BACKWARD = Scope.BACKWARD_FUNCTION


def batch_of(rows: list[tuple[int, int, int, int, int]]) -> Batch:
    """Rows of (start, thread, sequence_nr, scope, fwd_thread)."""
    keys = ("start", "thread", "sequence_nr", "scope", "fwd_thread")
    columns = {key: [row[i] for row in rows] for i, key in enumerate(keys)}
    return Batch.of(columns | {"end": columns["start"]}, [""], THREADS)


def pairs(batch: Batch) -> list[tuple[int, int]]:
    forward, backward = forward_backward(batch)
    return list(zip(forward.tolist(), backward.tolist(), strict=True))


def pairs_by_definition(batch: Batch) -> list[tuple[int, int]]:
    """The definition in the docstring, word by word, in O(n^2)."""
    rows = range(len(batch))
    start, number, scope = batch["start"], batch["sequence_nr"], batch["scope"]
    torch_tid = [batch.threads[thread].torch_tid for thread in batch["thread"]]
    found = []
    for b in rows:
        made_on = batch["fwd_thread"][b]
        if scope[b] != BACKWARD or number[b] < 0 or made_on == 0:
            continue
        candidates = [
            (start[f], f)
            for f in rows
            if scope[f] != BACKWARD and number[f] == number[b] and torch_tid[f] == made_on and start[f] <= start[b]
        ]
        if candidates:
            found.append((max(candidates)[1], b))
    return found


def test_a_phase_is_no_forward_operator():
    """What stands in the column of numbers is the address of its object there, and may be anybody's number."""
    batch = batch_of([(10, 0, 7, 0, 0), (20, 0, 7, 0, 12), (30, 1, 7, BACKWARD, 1)])
    assert pairs(batch) == [(1, 2)]
    batch["kind"][1] = Kind.PHASE
    assert pairs(batch) == [(0, 2)]


def test_nothing_to_pair():
    """No events, no numbers, no known threads: no pairs, and no error."""
    assert pairs(batch_of([])) == []
    assert pairs(batch_of([(0, 0, -1, 0, 0), (1, 0, -1, BACKWARD, 1)])) == []
    assert pairs(batch_of([(0, 2, 7, 0, 0), (1, 2, 7, BACKWARD, 0)])) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),
            st.integers(0, 2),
            st.integers(-1, 2) | st.just(2**62),
            st.sampled_from([Scope.FUNCTION, BACKWARD, Scope.USER_SCOPE]),
            st.integers(0, 3) | st.just(2**32 - 1),
        ),
        max_size=30,
    )
)
def test_agrees_with_the_definition(rows):
    """The vectorised join finds exactly the pairs that the definition gives, for any events in any order."""
    batch = batch_of(rows)
    assert pairs(batch) == pairs_by_definition(batch)


def models(torch):
    """Backward passes of the kinds that nest differently."""
    from torch.utils.checkpoint import checkpoint

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    x = torch.randn(3, 4, requires_grad=True)

    def second_derivative():
        (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()

    def twice():
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    return {
        "plain": lambda: model(x).sum().backward(),
        "checkpoint": lambda: checkpoint(model, x, use_reentrant=True).sum().backward(),
        "second derivative": second_derivative,
        "twice": twice,
    }


@pytest.mark.parametrize("name", ["plain", "checkpoint", "second derivative", "twice"])
def test_agrees_with_torch(name, tmp_path):
    """On real backward passes we find every arrow of torch's, and more only where a forward has two backwards."""
    torch = pytest.importorskip("torch")
    run = models(torch)[name]
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        run()
    path = tmp_path / "torch.json"
    prof.export_chrome_trace(str(path))
    batch = batch_of_torch(prof.profiler.kineto_results.events())
    forward, backward = forward_backward(batch)
    ours = set(zip(batch["start"][forward].tolist(), batch["start"][backward].tolist(), strict=True))
    theirs = torch_arrows(path)
    assert theirs
    assert theirs <= ours
    repeated = {start for start, _ in ours - theirs}
    assert repeated <= {start for start, _ in theirs}
    assert bool(repeated) == (name in {"second derivative", "twice"})


def batch_of_torch(events) -> Batch:
    """The events that torch recorded, without the numbers that it adds to ``evaluate_function`` afterwards."""
    events = sorted(events, key=lambda e: (e.start_thread_id(), e.start_ns(), -e.end_ns()))
    tids = sorted({e.start_thread_id() for e in events})
    columns = {
        "start": [e.start_ns() for e in events],
        "end": [e.end_ns() for e in events],
        "thread": [tids.index(e.start_thread_id()) for e in events],
        "sequence_nr": [-1 if "evaluate_function" in e.name() else e.sequence_nr() for e in events],
        "scope": [e.scope() for e in events],
        "fwd_thread": [e.fwd_thread_id() for e in events],
    }
    return Batch.of(columns, [""], [RecordedThread(tid, tid, tid) for tid in tids])


def torch_arrows(path) -> set[tuple[int, int]]:
    """(forward start, backward start) in Unix ns of each arrow in a trace of torch's."""
    trace = json.loads(path.read_text(), parse_float=lambda text: int(text.replace(".", "")))
    ends: dict[tuple[str, int], int] = {
        (e["ph"], e["id"]): e["ts"] + trace["baseTimeNanoseconds"] for e in trace["traceEvents"] if e["ph"] in "sf"
    }
    return {(at, ends["f", number]) for (phase, number), at in ends.items() if phase == "s"}
