"""Interpreters beside the main one, and a build of Python without its lock: refused with a reason, and never mixed up."""

import importlib.util
import runpy
import sysconfig
from pathlib import Path

import pytest
from frame_runs import printed, run

SETUP = Path(__file__).resolve().parent.parent.parent / "setup.py"

# Until 3.12 those of this module have the main one's lock unless they are isolated; 3.13 named the module and the kinds anew.
MAKES_ONE = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

def make(isolated):
    if sys.version_info >= (3, 13):
        number = interpreters.create("isolated" if isolated else "legacy")
    else:
        number = interpreters.create(isolated=isolated)
    interpreters.run_string(number, f"import sys; sys.path[:] = {sys.path!r}")
    return number
"""

IMPORTS = """
try:
    import otel_torchprof
except ImportError as error:
    assert "records in the main interpreter only" in str(error), error
    assert "import it there" in str(error), error
else:
    raise AssertionError("it was imported")
"""


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("order", ["main first", "sub first"])
def test_a_subinterpreter_is_refused(isolated, order):
    """Importing the package there raises an error that says why and the way out, and the main interpreter records all the same."""
    program = f"""{MAKES_ONE}
if {order == "main first"}:
    import otel_torchprof
for _ in range(3):
    number = make({isolated})
    interpreters.run_string(number, {IMPORTS!r})
    interpreters.run_string(number, {IMPORTS!r})
    interpreters.destroy(number)
import otel_torchprof as otp
with otp.profile(operators=False, with_stack=True) as prof, otp.record_function("label"):
    len("called")
print(sum(event.name == "label" for event in prof.events()))
"""
    assert printed(program) == ["1"]


RUNS_BESIDE = f"""{MAKES_ONE}
import threading
from frame_trees import names_of, recorded, tree

INSIDE = '''
import threading
def called_in_sub(depth):
    len("called in sub")
    return called_in_sub(depth - 1) if depth else None
for _ in range(20):
    called_in_sub(10)
'''
INSIDE_THREAD = '''
thread = threading.Thread(target=called_in_sub, args=(10,))
thread.start()
thread.join()
'''

def called_in_main(number, may_have_threads):
    interpreters.run_string(number, INSIDE + INSIDE_THREAD * may_have_threads)
    ord("m")

def in_thread(isolated):
    for _ in range(5):
        number = make(isolated)
        called_in_main(number, not isolated or sys.version_info >= (3, 12))
        interpreters.destroy(number)

def program():
    threads = [threading.Thread(target=in_thread, args=(isolated,)) for isolated in (True, False)]
    for thread in threads:
        thread.start()
    in_thread(True)
    for thread in threads:
        thread.join()

for _ in range(3):
    batch = recorded(program, all_threads=True)
    names = names_of(batch)
    assert names.count("called_in_main") == 15, names.count("called_in_main")
    assert "called_in_sub" not in names
    inside = [line for line in tree(batch, "called_in_main") if line.startswith(".") and not line.startswith("..")]
    assert {{line.split(" of ")[0] for line in inside}} == {{
        ".<built-in function run_string>", ".<built-in function ord>"
    }}, set(inside)
print("right")
"""


def test_subinterpreters_run_while_calls_are_recorded():
    """Calls there, on the recorded threads and on threads of their own, are in no recording and harm none."""
    assert printed(RUNS_BESIDE) == ["right"]


def test_a_free_threaded_build_is_refused():
    """Importing the package on a Python without the GIL raises an error with the way out, before anything compiled is loaded."""
    done = run(
        "import sys; sys.abiflags += 't'\n"
        "try: import otel_torchprof\n"
        "except ImportError as error: print(error)\n"
        "print([name for name in sys.modules if '._core' in name or '._python' in name])",
        is_new=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "free-threaded build" in done.stdout
    assert "use the build with the GIL" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_a_free_threaded_build_does_not_build(monkeypatch):
    """Nor is anything compiled for it."""
    pytest.importorskip("setuptools")
    monkeypatch.setitem(sysconfig.get_config_vars(), "Py_GIL_DISABLED", 1)
    with pytest.raises(SystemExit, match=r"cannot be built for a free-threaded Python.*build it with the interpreter"):
        runpy.run_path(str(SETUP))


def test_without_cffi_nothing_builds(monkeypatch):
    """A build without cffi, which would leave the core out, ends with an error that says what to install."""
    pytest.importorskip("setuptools")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cffi" else find(name))
    with pytest.raises(SystemExit, match="pip install cffi setuptools"):
        runpy.run_path(str(SETUP))
