"""Instrument, run a model, uninstrument, 200 times over: torch, the provider and the process are as before."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from providers import instrumented, new_provider  # noqa: E402
from torch.nn.modules import module as torch_modules  # noqa: E402
from torch.optim import optimizer as torch_optimizers  # noqa: E402

import otel_torchprof as otp  # noqa: E402

CYCLES = 100
STEPS = 2
DETAILS = ("steps", "modules", "ops")


def hooks():
    """Everything that is registered with torch for all modules and all optimizers."""
    places = {**vars(torch_modules), **vars(torch_optimizers)}
    return {
        name: len(place) for name, place in places.items() if name.startswith("_global_") and isinstance(place, dict)
    }


def observed():
    """Whether torch has any observer of operators, global or the calling thread's, as torch itself knows."""
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    has_callbacks = library._ZN2at12hasCallbacksEv
    has_callbacks.restype = ctypes.c_bool
    return has_callbacks()


def train():
    """Operators, modules, backward threads and steps of an optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def processors(provider):
    return provider._active_span_processor._span_processors


@pytest.mark.parametrize("detail", DETAILS)
def test_hooks_are_found_while_they_are_there(detail):
    """What the other tests look for is there while instrumented, so that its not being found means something."""
    processor = otp.TorchSpanProcessor()
    before, threads = hooks(), set(threading.enumerate())
    with instrumented(new_provider(processor), detail=detail):
        assert hooks() != before
        assert observed() == (detail == "ops")
        assert set(threading.enumerate()) > threads


def test_threads_that_train_meanwhile():
    """Other threads train through all of it, and neither they nor torch are left with anything."""
    done, wrong = threading.Event(), []

    def work():
        try:
            while not done.is_set():
                train()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            wrong.append(error)

    before = hooks()
    workers = [threading.Thread(target=work) for _ in range(2)]
    processor = otp.TorchSpanProcessor()
    provider = new_provider(processor)
    for worker in workers:
        worker.start()
    try:
        for cycle in range(CYCLES):
            otp.TorchInstrumentor().instrument(tracer_provider=provider, detail=DETAILS[cycle % len(DETAILS)])
            train()
            otp.TorchInstrumentor().uninstrument()
    finally:
        done.set()
        for worker in workers:
            worker.join()
    assert wrong == []
    assert (hooks(), observed()) == (before, False)
    assert processor.health.recorded > 0
    provider.shutdown()


@pytest.mark.parametrize("detail", DETAILS)
def test_steps_are_no_work_for_the_garbage_collector(detail):
    """A thousand drained steps leave the collector no object per step, so none of its full collections comes because of them."""
    seen: Counter[str] = Counter()

    def look(phase, _info):
        if phase == "start":
            # Tuples of plain values are let go of at their first visit.
            seen.update(type(each).__name__ for each in gc.get_objects(generation=0) if type(each) is not tuple)

    model, others = torch.nn.Linear(4, 4), gc.callbacks[:]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    processor = otp.TorchSpanProcessor()
    provider = new_provider(processor)
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail=detail)
    try:
        gc.collect()
        full = gc.get_stats()[2]["collections"]
        gc.callbacks.append(look)
        for _ in range(1000):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert provider.force_flush()
        gc.callbacks.remove(look)
        assert gc.get_stats()[2]["collections"] == full
        assert {name: count for name, count in seen.items() if count > 500} == {}
    finally:
        gc.callbacks[:] = others
        otp.TorchInstrumentor().uninstrument()
        processor.shutdown()
