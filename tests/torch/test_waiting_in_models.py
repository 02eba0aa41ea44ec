"""Threads that wait while a model's calls are recorded."""

import functools
import itertools
import operator
import threading

import torch
from torch.profiler import ProfilerActivity

from otel_torchprof import profile

_call = operator.methodcaller("__call__")


class _Waits(torch.nn.Module):
    """Goes on when it is let on. Between ``there`` and ``go`` only C functions call one another, of which no tracer is told."""

    def __init__(self):
        super().__init__()
        self.there, self.go = _closed(), _closed()

    def forward(self, more):
        list(map(_call, [self.there.release, self.go.acquire, *more]))


def _closed():
    lock = threading.Lock()
    lock.acquire()
    return lock


def _in_model(program, *more):
    """Runs a program while a thread waits in a model, and the thread's system id."""
    waits = _Waits()
    thread = threading.Thread(target=torch.nn.Sequential(waits), args=(more,))
    thread.start()
    assert waits.there.acquire(timeout=30)
    try:
        return program(waits), thread.native_id
    finally:
        if waits.go.locked():
            waits.go.release()
        thread.join(30)


def _chain_of_torch(_waits):
    """The calls that torch's tracer has on a thread of which it knows nothing else."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], with_stack=True) as prof:
        torch.ones(2)
    roots = [
        node
        for node in prof.profiler.kineto_results.experimental_event_tree()
        if node.name.startswith("threading.py") and node.name.endswith(": _bootstrap")
    ]
    # Other tests may have left threads that wait; torch hangs the calls of one below those of another.
    names = list(itertools.chain.from_iterable(map(_chain_from, roots)))
    begins = [place for place, name in enumerate(names) if name == roots[0].name] + [len(names)]
    threads = [names[begin:end] for begin, end in itertools.pairwise(begins)]
    return next(calls for calls in threads if "nn.Module: _Waits_0" in calls)


def _chain_from(node):
    names = [node.name]
    while node.children:
        node = node.children[0]
        names.append(node.name)
    return names


def _ours(_waits):
    with profile(with_stack=True) as prof:
        torch.ones(2)
    return prof


def _of_thread(prof, os_tid):
    return [event for event in prof.events() if event.device_resource_id == os_tid]


def test_same_calls_as_torch():
    """What a thread waits in is what torch's tracer shows of it, modules among it; three times over."""
    expected, _ = _in_model(_chain_of_torch)
    assert [name for name in expected if name.startswith("nn.Module")] == [
        "nn.Module: Sequential_0",
        "nn.Module: _Waits_0",
    ]
    for _ in range(3):
        prof, os_tid = _in_model(_ours)
        waiting = _of_thread(prof, os_tid)
        assert [event.name for event in waiting] == expected
        assert [event.module.qualified_name for event in waiting if event.module] == ["Sequential", "0"]


def test_operators_of_a_thread_that_waits_for_c():
    """Operators that a C function runs, which takes all the time, have the stack of the thread that called it."""
    ran, end = _closed(), _closed()

    def program(waits):
        with profile(with_stack=True, all_threads=True) as prof:
            waits.go.release()
            assert ran.acquire(timeout=30)
        end.release()
        return prof

    operators = functools.partial(torch.neg, torch.ones(3))
    prof, os_tid = _in_model(program, operators, ran.release, end.acquire)
    (neg,) = [event for event in _of_thread(prof, os_tid) if event.name == "aten::neg"]
    assert neg.cpu_parent.name.endswith(": forward")
    assert neg.cpu_parent.name == neg.stack[0]
    assert neg.stack[-1].endswith(": _bootstrap")
    assert "nn.Module: _Waits_0" in neg.stack
