"""Forks while recording, and interpreters that end while recording."""

from __future__ import annotations

import os

import pytest
from forked import in_child

torch = pytest.importorskip("torch", minversion="2.6")

from observed import python, recorded_names, succeeds  # noqa: E402

import otel_torchprof as otp  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
X = torch.ones(3)


@pytest.mark.parametrize("all_threads", [False, True])
def test_the_child_is_off_and_the_parent_goes_on(all_threads):
    """The child records nothing more for its parent's profile, says so, and can profile by itself; the parent notices nothing."""

    def child():
        X.sin()
        with otp.record_function("child's"):
            X.cos()
        said = prof.health.operators, prof.health.labels
        with otp.profile() as own, otp.record_function("own"):
            X.exp()
        with otp.profile(all_threads=True) as another:
            X.log()
        return said, recorded_names(own), recorded_names(another)

    with otp.profile(all_threads=all_threads) as prof, otp.record_function("parent's"):
        X.neg()
        said = in_child(child)
        X.tan()
    assert said.count("'off: ") == 2
    assert "fork" in said
    assert said.endswith("['own', 'aten::exp'], ['aten::log'])")
    assert recorded_names(prof) == ["parent's", "aten::neg", "aten::tan"]
    assert prof.columns["flags"].tolist() == [0, 0, 0]


def test_a_fork_within_an_operator():
    """A child that is forked inside an operator and leaves it harms neither itself nor its parent."""
    said = []

    class Forks(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            pid = os.fork()
            said.append(pid)
            return x.neg()

    reader, writer = os.pipe()
    with otp.profile() as prof:
        Forks.apply(X)
        if said[0] == 0:
            X.tan()
            with otp.profile() as own:
                X.exp()
            os.write(writer, repr(recorded_names(own)).encode())
            os._exit(0)
        X.tan()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "['aten::exp']"
    assert os.waitpid(said[0], 0)[1] == 0
    assert recorded_names(prof) == ["Forks", "aten::neg", "aten::tan"]


def test_stop_in_the_child_is_refused_but_leaving_the_block_is_not():
    """stop() of a parent's profile says what is wrong; a `with` block that the child leaves lets its own exception through."""

    def child():
        try:
            prof.__exit__(None, None, None)
            prof.stop()
        except otp.NativeError as error:
            return str(error)

    with otp.profile() as prof:
        X.neg()
        said = in_child(child)
    assert "fork" in said
    done = python(
        "import os, sys, torch, otel_torchprof as otp\n"
        "with otp.profile():\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n",
        has_torch=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


ENDS = {
    "running": "prof = otp.profile(); prof.start(); x.neg()",
    "running everywhere": "prof = otp.profile(all_threads=True); prof.start(); x.neg()",
    "label open": "prof = otp.profile(); prof.start(); otp.record_function('open').__enter__()",
    "sys.exit": "with otp.profile(), otp.record_function('a'): sys.exit(0)",
    "generator left": (
        "@otp.record_function('g')\ndef g():\n    yield 1\n    yield 2\n"
        "prof = otp.profile(); prof.start(); g = g(); next(g)"
    ),
}


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(ending, marks=() if ending in {"running", "generator left"} else pytest.mark.exhaustive)
        for ending in ENDS
    ],
)
def test_the_interpreter_ends_while_recording(ending):
    """An interpreter that ends within a profile ends with status 0, and says no more than that nobody stopped it."""
    done = python(f"import sys, torch, otel_torchprof as otp; x = torch.ones(3)\n{ENDS[ending]}")
    assert (done.returncode, done.stdout) == (0, "")
    assert [line[:33] for line in done.stderr.splitlines()] == ["a profile was dropped while it re"] * (
        "start()" in ENDS[ending]
    )


def test_a_keyboard_interrupt_within_a_label():
    """A signal inside a label and a profile ends both; the profile can be read."""
    printed = succeeds(
        "import os, signal, torch, otel_torchprof as otp\n"
        "x = torch.ones(3)\n"
        "try:\n"
        "    with otp.profile() as prof, otp.record_function('a'):\n"
        "        x.neg()\n"
        "        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        while True: x.neg()\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
        "print(prof.names[prof.columns['error_type'][0]])\n",
        has_torch=True,
    )
    assert printed == "KeyboardInterrupt\n"
