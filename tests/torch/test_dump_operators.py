"""``otel-torchprof dump`` of this process while a thread of it is in an operator that waits."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from checked_json import checked
from opentelemetry.sdk.trace import TracerProvider

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._process import private_folder

ready, done = threading.Event(), threading.Event()


class Waiting(torch.autograd.Function):
    """An operator that ends when the test is over."""

    @staticmethod
    def forward(_ctx, x):
        ready.set()
        done.wait()
        return x

    @staticmethod
    def backward(_ctx, gradient):
        return gradient


class Inner(torch.nn.Module):
    def forward(self, x):
        return Waiting.apply(x)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)


@pytest.fixture
def waiting(monkeypatch, tmp_path):
    """A thread that is in an operator, in a module, in a module, in a known function; with a black box."""
    monkeypatch.setattr(private_folder, "_SHARED_MEMORY", str(tmp_path))
    provider = TracerProvider(shutdown_on_exit=False)
    otp.TorchInstrumentor().instrument(
        tracer_provider=provider, skip_dep_check=True, detail="ops", blackbox=f"ops,1M,{tmp_path}/boxes"
    )
    net = Net()

    def train_step():
        net(torch.ones(2, requires_grad=True))

    thread = threading.Thread(target=train_step, name="trainer")
    thread.start()
    assert ready.wait(60)
    yield thread
    done.set()
    thread.join()
    otp.TorchInstrumentor().uninstrument()


def test_python_calls_operators_modules_and_phases_are_one_tree(waiting, capsys):
    """Function, phase, both modules and the operator are in the order in which they are inside each other."""
    assert cli.main(["dump", str(os.getpid()), "--json"]) == 0
    (process,) = checked("dump", capsys.readouterr().out)
    (places,) = [thread["places"] for thread in process["threads"] if thread["os_tid"] == waiting.native_id]
    found = [(place["kind"], place["name"]) for place in places]
    expected = [
        ("python", "train_step"),
        ("phase", "torch.phase.forward"),
        ("module", "Net"),
        ("module", "inner"),
        ("operator", "Waiting"),
    ]
    assert [each for each in found if each in expected] == expected
    assert all(place["since_ns"] > 0 for place in places if place["kind"] != "python")
