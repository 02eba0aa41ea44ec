"""Coverage, debugpy and py-spy on a program whose calls are recorded: they and the recording have what each has alone."""

import os
import shutil
import subprocess
import sys

import pytest
from debug_client import stops_at
from frame_runs import HELPERS, ROOT, printed

from examples import one_in

WORKED_ON = """
import threading

def leaf(number):
    if number % 2:
        return "odd"
    return "even"

def never():
    return 1

def raises():
    raise ValueError("by the program")

def generates():
    yield from range(3)

def work():
    for number in range(5):
        leaf(number)
    try:
        raises()
    except ValueError:
        pass
    list(generates())
    thread = threading.Thread(target=leaf, args=(2,))
    thread.start()
    thread.join()
"""
CALLS = "leaf:6 raises:1 generates:4 work:1 never:0"

RECORDS = """
import sys
from collections import Counter
sys.path.insert(0, {folder!r})
from frame_trees import masked, recording
import worked_on

def calls(record):
    batch = record
    assert record.health.notes == (), record.health.notes
    counts = Counter()
    for name, count in Counter(batch.columns["name"].tolist()).items():
        counts[masked(batch.names[name])] += count
    return " ".join(f"{{name}}:{{counts[name]}}" for name in ("leaf", "raises", "generates", "work", "never"))
"""

COVERS = """
import os
import coverage

def started():
    branch = os.environ["COVERAGE_CORE"] != "sysmon"  # by which branches can be measured since Python 3.14
    measure = coverage.Coverage(data_file=None, branch=branch, include=[worked_on.__file__])
    measure.start()
    return measure

def covered(measure):
    measure.stop()
    data = measure.get_data()
    return sorted(data.arcs(worked_on.__file__) if data.has_arcs() else data.lines(worked_on.__file__))

alone = started()
worked_on.work()
expected = covered(alone)

outside = started()
with recording(all_threads=True) as record:
    worked_on.work()
assert covered(outside) == expected
print(calls(record))

with recording(all_threads=True) as record:
    inside = started()
    worked_on.work()
    assert covered(inside) == expected
print(calls(record))

crossing = started()
with recording(all_threads=True) as record:
    worked_on.work()
    assert covered(crossing) == expected
    worked_on.never()
print(calls(record))
"""


@pytest.fixture
def worked_on(tmp_path):
    """The file that the tools look at."""
    path = tmp_path / "worked_on.py"
    path.write_text(WORKED_ON)
    return path


@pytest.mark.parametrize("core", ["ctrace", "pytrace", *(["sysmon"] if sys.version_info >= (3, 12) else [])])
def test_coverage(worked_on, core, monkeypatch):
    """Coverage has the same lines and branches with a recording inside, around and across it as without, and each recording all calls."""
    pytest.importorskip("coverage")
    monkeypatch.setenv("COVERAGE_CORE", core)
    once = CALLS.split()
    assert printed(RECORDS.format(folder=str(worked_on.parent)) + COVERS) == [*once, *once, *once[:-1], "never:1"]


WAITS = """
import debugpy

def attach():
    print(debugpy.listen(("127.0.0.1", 0))[1], flush=True)
    debugpy.wait_for_client()
"""
DEBUGGED = {
    "before": "attach()\nwith recording(all_threads=True) as record: worked_on.work()",
    "inside": "with recording(all_threads=True) as record:\n    attach()\n    worked_on.work()",
    "after": "with recording(all_threads=True) as record: worked_on.work()\nattach()\nworked_on.work()",
}


@pytest.mark.parametrize("when", one_in(3, DEBUGGED))
def test_debugpy(worked_on, when):
    """Each breakpoint is hit on every thread, whether the debugger attaches before, in or after a recording, which has all calls."""
    pytest.importorskip("debugpy")
    program = RECORDS.format(folder=str(worked_on.parent)) + WAITS + DEBUGGED[when] + "\nprint(calls(record))"
    path = os.pathsep.join([str(ROOT), str(HELPERS)])
    debugged = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
    )
    try:
        line = WORKED_ON.splitlines().index('    return "even"') + 1
        assert stops_at(int(debugged.stdout.readline()), str(worked_on), line) == ["leaf"] * 4
        assert debugged.communicate(timeout=60)[0].strip() == CALLS
    finally:
        debugged.kill()
        debugged.communicate()
    assert debugged.returncode == 0


WAITS_IN_CALLS = """
def innermost_of_main():
    print("ready", flush=True)
    sys.stdin.read()

with recording(all_threads=True) as record:
    worked_on.work()
    innermost_of_main()
print(calls(record))
"""


def test_py_spy(worked_on):
    """Py-spy shows the stack of a program that is being recorded, which is recorded to its end."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))  # noqa: PTH120
    if spy is None:
        pytest.skip("py-spy is not installed")
    spied = subprocess.Popen(
        [sys.executable, "-c", RECORDS.format(folder=str(worked_on.parent)) + WAITS_IN_CALLS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HELPERS)])},
    )
    try:
        assert spied.stdout.readline() == "ready\n"
        command = [spy, "dump", "--pid", str(spied.pid)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if "Permission" in done.stderr:
            pytest.skip("py-spy may not look at other processes here")
        assert "innermost_of_main" in done.stdout, done.stderr
        assert spied.communicate(timeout=60)[0].strip() == CALLS
    finally:
        spied.kill()
        spied.communicate()
    assert spied.returncode == 0
