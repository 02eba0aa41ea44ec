"""Programs that are forked from a process with this package are what they would be, had an interpreter started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import forked_programs
import pytest

SEES = """
import atexit, os, sys, threading
atexit.register(print, "at exit")
import otel_torchprof
print(__name__, sys.argv, sys.path[0], os.getcwd(), sys.warnoptions, os.environ.get("OF_THE_TEST"), os.environ.get("TERM"))
print(sorted(os.listdir("/proc/self/fd"), key=int)[:-1], sys.stdin.read(), os.getsid(0) == os.getpid(), threading.active_count())
print("said", file=sys.stderr)
os.write(int(sys.argv[1]), b"to the pipe")
sys.exit(3)
"""


def outcome(start, folder, form):
    """What a program sees and leaves, started with streams, a descriptor, a filter, a folder, an environment and a session of its own."""
    (folder / "seen.py").write_text(SEES)
    reader, writer = os.pipe()
    words = {"-c": ["-c", SEES], "-m": ["-m", "seen"], "file": ["./seen.py"]}[form]
    process = start(
        [sys.executable, "-W", "ignore", *words, str(writer)],
        cwd=folder,
        env={**os.environ, "OF_THE_TEST": form, "PYTHONPATH": str(forked_programs.ROOT)},
        pass_fds=[writer],
        start_new_session=True,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    with process:
        said = process.communicate("typed", 60)
    with os.fdopen(reader) as pipe:
        return said[0].replace(str(writer), "WRITER"), said[1], process.returncode, pipe.read()


@pytest.mark.parametrize("form", ["-c", "-m", "file"])
def test_as_an_interpreter_would(tmp_path, form):
    """What it sees of itself, says, writes and ends with is the same in each of the three forms."""
    assert outcome(forked_programs.Popen, tmp_path, form) == outcome(subprocess.Popen, tmp_path, form)


def test_one_that_does_not_end():
    """It can be waited for with a limit, be killed, and its status is the signal's."""
    words = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(subprocess.TimeoutExpired):
        forked_programs.run(words, timeout=0.01)
    process = forked_programs.Popen(words)
    assert process.poll() is None
    process.kill()
    assert (process.wait(), process.poll()) == (-signal.SIGKILL, -signal.SIGKILL)


def test_variables_that_an_interpreter_reads():
    """A program whose environment has what only a start of the interpreter would see is refused."""
    with pytest.raises(AssertionError, match="PYTHONIOENCODING counts where an interpreter starts"):
        forked_programs.run([sys.executable, "-c", ""], env={**os.environ, "PYTHONIOENCODING": "ascii"})
