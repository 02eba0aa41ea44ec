"""Loading the library that records torch's operators: by many threads at once, while others record, interrupted, and after failures."""

from __future__ import annotations

import os
from pathlib import Path

import preloaded
import pytest

pytest.importorskip("torch", minversion="2.6")

from otel_torchprof._native import torch_library
from otel_torchprof.errors import TorchLibraryError

ROOT = Path(__file__).resolve().parent.parent.parent


def run(program):
    """What a program prints in a process of its own, which has torch and nothing of this package."""
    done = preloaded.run(program, environment={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout


COLD = """
import threading, torch, otel_torchprof as otp
from opentelemetry.sdk.trace import TracerProvider

torch.set_num_threads(1)
barrier, errors = threading.Barrier(12), []

def profile():
    with otp.profile(record_shapes=True, profile_memory=True, with_stack=True, all_threads=True) as prof:
        torch.ones(3).neg()
    assert "aten::neg" in [event.name for event in prof.events()]

def instrument():
    otp.TorchInstrumentor().instrument(tracer_provider=TracerProvider(), sigterm_timeout=0)

def work(function):
    barrier.wait()
    try:
        for _ in range(3):
            function()
    except BaseException as error:
        errors.append(repr(error))

threads = [threading.Thread(target=work, args=(instrument if number % 4 == 0 else profile,)) for number in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
otp.TorchInstrumentor().uninstrument()
profile()
print(errors)
"""


def test_many_threads_begin_at_once():
    """The first profiles of a process and its first ``instrument()`` may come together, from as many threads as there are."""
    assert run(COLD) == "[]\n"


BESIDE_OTHERS = """
import contextlib, torch, otel_torchprof as otp
from otel_torchprof._native import torch_library

def beside(*recordings):
    with contextlib.ExitStack() as stack:
        for recording in recordings:
            stack.enter_context(recording)
        torch.ones(3).neg()
        torch_library._loading = torch_library._Loading()
        torch_library.load()

beside(otp.profile(record_shapes=True, all_threads=True), otp.profile(profile_memory=True, all_threads=True))
beside(otp.profile(record_shapes=True, profile_memory=True, with_stack=True, with_modules=True, with_flops=True, all_threads=True))
beside(torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=True))
beside(torch.autograd.profiler.emit_nvtx() if torch.cuda.is_available() else torch.autograd.profiler.profile(), otp.profile())
print("loaded")
"""


def test_the_trial_beside_recordings():
    """The trial of a library is right whatever others record at that time, also with torch's profiler."""
    assert run(BESIDE_OTHERS) == "loaded\n"


IN_THE_MIDDLE = """
import os, signal, sys, threading, torch, otel_torchprof as otp
from otel_torchprof._native import torch_library
from otel_torchprof.errors import TorchLibraryError

recorded, middle, said = torch_library._recorded_negation, [], []

def with_middle(torch, library):
    if middle:
        middle.pop()()
    return recorded(torch, library)

torch_library._recorded_negation = with_middle

def profile():
    with otp.profile() as prof:
        torch.ones(3).neg()
    assert "aten::neg" in [event.name for event in prof.events()]

def profile_in_finalizer():
    try:
        profile()
    except TorchLibraryError as error:
        said.append(str(error))

# On the thread of the trial, and on the one that waits for it.
middle.append(profile_in_finalizer)
profile()
assert "is being loaded" in said.pop()

torch_library._loading = torch_library._Loading()
signal.signal(signal.SIGUSR1, lambda *_: profile_in_finalizer())
def signalled():
    os.kill(os.getpid(), signal.SIGUSR1)
middle.append(signalled)
profile()
assert not said or "is being loaded" in said.pop()

# A failure of the trial's own, and an interrupt.
for error in (RuntimeError("no memory"), KeyboardInterrupt()):
    torch_library._loading = torch_library._Loading()
    def failing(error=error):
        raise error
    middle.append(failing)
    try:
        profile()
    except TorchLibraryError as raised:
        assert "recording one operator failed" in str(raised)
    else:
        raise AssertionError
    profile()

# A fork, of which the child has not the thread that loads.
torch_library._loading = torch_library._Loading()
here, go_on = threading.Event(), threading.Event()
middle.append(lambda: (here.set(), go_on.wait()))
loading = threading.Thread(target=profile)
loading.start()
here.wait()
if (child := os.fork()) == 0:
    profile()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
go_on.set()
loading.join()
profile()
"""


def test_in_the_middle_of_loading():
    """A finalizer or a signal handler that records meanwhile gets an error and no deadlock, and no failure stays."""
    assert run(IN_THE_MIDDLE) == "7\n"


FORKED_WHILE_BUILDING = """
import os, threading, torch, otel_torchprof as otp
from pathlib import Path
from otel_torchprof._native import torch_build

folder, made = Path({folder!r}), Path({made!r})
os.environ["OTEL_TORCHPROF_BUILD_DIR"] = str(folder)
here, go_on, run = threading.Event(), threading.Event(), torch_build._run_compilers

def hand_out(commands, output):
    here.set()
    go_on.wait()
    for command in commands:
        Path(command[command.index("-o") + 1]).write_bytes(made.read_bytes())
    return run([["true"]], output)

torch_build._run_compilers = hand_out
errors = []
def profile():
    try:
        with otp.profile(): torch.ones(3).neg()
    except BaseException as error:
        errors.append(error)
loading = threading.Thread(target=profile)
loading.start()
here.wait()
if (child := os.fork()) == 0:
    raise SystemExit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), [path.suffix for path in sorted(folder.iterdir())])
reader, writer = os.pipe()
if (child := os.fork()) == 0:
    os.read(reader, 1)
    go_on.set()
    torch_build.ensure(torch)
    os._exit(8)
go_on.set()
loading.join()
(folder / torch_build.library_name(torch)).unlink()
os.write(writer, b"1")
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), errors)
"""


def test_a_fork_while_it_is_built(tmp_path):
    """A child that is forked in the middle of a build neither removes what is built there at its exit nor waits for the lock."""
    made = torch_library.load().path
    program = FORKED_WHILE_BUILDING.format(folder=str(tmp_path / "new"), made=str(made))
    assert run(program) == "7 ['.building', '.lock']\n8 []\n"


def test_failures_are_kept_as_long_as_they_are_expensive(monkeypatch):
    """A quick failure is tried again at once, a slow one after a hundred times as long, and the error says when."""
    now, seconds, attempts = [1000.0], [0.5], []

    def failing(_torch):
        now[0] += seconds[0]
        attempts.append(now[0])
        raise TorchLibraryError("building failed")

    monkeypatch.setattr(torch_library, "_load", failing)
    loading = torch_library._Loading(lambda: now[0])
    for _ in range(2):
        with pytest.raises(TorchLibraryError, match=r"^building failed$"):
            loading.library(None)
    seconds[0] = 30.0
    with pytest.raises(TorchLibraryError, match=r"^building failed$"):
        loading.library(None)
    now[0] += 2900.0
    with pytest.raises(TorchLibraryError, match="building failed\nNot tried again for another 100 s, unless in a new"):
        loading.library(None)
    assert len(attempts) == 3
    now[0] += 101.0
    monkeypatch.setattr(torch_library, "_load", lambda _torch: "the library")
    assert loading.library(None) == "the library"
