"""Programs that are forked from a process with torch: what becomes of each is what the test is told."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import preloaded
import pytest

pytest.importorskip("torch", minversion="2.6")

ROOT = Path(__file__).resolve().parent.parent.parent


def run(program, *arguments, timeout=60.0, **environment):
    """What became of a program: its status and what it wrote."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = preloaded.run(program, *arguments, environment=variables, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(7)", 7),
        ("import os; os._exit(8)", 8),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import os; os.kill(os.getpid(), 2)", -signal.SIGINT),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_status(program, status):
    """The status is the interpreter's own, after an exception, an exit and each signal; and the next program runs all the same."""
    assert run(program)[0] == status
    assert run("print('next')") == (0, "next\n", "")


def test_what_is_raised_is_told():
    """The traceback of an exception ends with its type and words."""
    assert run("def f():\n    raise LookupError('x')\nf()")[2].endswith("in f\nLookupError: x\n")


def test_a_program_that_hangs():
    """A program that lasts too long is killed and fails the test; the one after it gets its own answer."""
    with pytest.raises(subprocess.TimeoutExpired):
        run("import signal\nsignal.pause()", timeout=0.3)
    assert run("print('next')") == (0, "next\n", "")


def test_a_child_that_is_left_behind():
    """A program whose child stays, with the streams of its parent, fails the test, as it does with an interpreter of its own."""
    program = "import os, signal\npid = os.fork()\nif pid == 0: signal.alarm(2), signal.pause()"
    with pytest.raises(subprocess.TimeoutExpired):
        run(program, timeout=1)


def test_it_is_main_with_what_it_was_given(tmp_path):
    """The program has its own arguments, variables, folder and module, of which nothing is left for the next one."""
    path = tmp_path / "program.py"
    path.write_text(
        "import os, sys, __main__\nprint(sys.argv[1:], os.environ.get('GIVEN'), __main__.__file__ == __file__)\ng = 1"
    )
    assert run(path, "a", "b", GIVEN="yes") == (0, "['a', 'b'] yes True\n", "")
    assert run("import os, __main__; print(os.environ.get('GIVEN'), hasattr(__main__, 'g'))") == (0, "None False\n", "")


def test_it_ends_as_an_interpreter():
    """Handlers at exit and finalizers of what is left run, and what was written is not lost; as where torch's compiler is imported."""
    program = "import atexit\natexit.register(print, 'exit')\nclass A:\n    def __del__(self): print('end', flush=True)\na = A()\nprint('x', end='')"
    assert run(program) == (0, "xexit\nend\n", "")


def test_nothing_of_ours_is_there_before():
    """A program begins with torch and one thread, and without this package and OpenTelemetry."""
    program = (
        "import os, sys\n"
        "print('torch' in sys.modules, len(os.listdir('/proc/self/task')),\n"
        "      [name for name in sys.modules if name.startswith(('otel_', 'opentelemetry', 'pytest'))])"
    )
    assert run(program) == (0, "True 1 []\n", "")


def test_variables_that_would_have_no_effect_are_refused():
    """What counts when an interpreter starts, or torch is loaded, cannot be given to a program here."""
    with pytest.raises(AssertionError, match="PYTHONDEVMODE counts where an interpreter starts"):
        run("", PYTHONDEVMODE="1")
