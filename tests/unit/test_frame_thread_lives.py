"""The tracer of calls on threads that come and go as they like, born in Python, below it, or in C."""

import ctypes
import shutil
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from frame_runs import printed
from frame_trees import masked, recorded, recording, tree

from otel_torchprof._columns.schema import Flag
from otel_torchprof._native.recorder import now_ns

THREADS = 50


def _leaf():
    return len("leaf")


def _of_other_threads(batch):
    """How often what was called, one for each thread but this one that calls ``_leaf``; by number, as ended ones have no name."""
    found = {}
    for number, thread in enumerate(batch.threads):
        if thread.ident != threading.get_ident():
            rows = (batch["thread"] == number).nonzero()[0]
            found[number] = Counter(masked(batch.names[name]) for name in batch["name"][rows].tolist())
    return [calls for calls in found.values() if calls["_leaf"]]


def test_threads_that_start_and_end_meanwhile():
    """Fifty threads, most of which end before the next one starts, have each its own call, once, and nothing unfinished."""

    def program():
        threads = [threading.Thread(target=_leaf) for _ in range(THREADS)]
        for number, thread in enumerate(threads):
            thread.start()
            if number % 5:
                thread.join()
        for thread in threads:
            thread.join()

    batch = recorded(program, all_threads=True)
    assert [calls["_leaf"] for calls in _of_other_threads(batch)] == [1] * THREADS
    assert tree(batch, "_leaf") == [".<built-in function len>"] * THREADS
    leaves = [row for row, name in enumerate(batch["name"].tolist()) if masked(batch.names[name]) == "_leaf"]
    assert not any(batch["flags"].item(row) & Flag.UNFINISHED for row in leaves)


def test_thread_pool():
    """Tasks of a pool that starts meanwhile are all there, on no more threads than the pool has."""

    def program():
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: _leaf(), range(100)))

    found = [calls["_leaf"] for calls in _of_other_threads(recorded(program, all_threads=True))]
    assert 1 <= len(found) <= 4
    assert sum(found) == 100


def test_thread_that_ends_after_the_stop():
    """A thread that is in the middle of a call at the stop has it as unfinished, goes on untraced, and ends."""
    entered, leave, seen = threading.Event(), threading.Event(), []

    def work():
        entered.set()
        leave.wait(30)
        _leaf()
        seen.append(sys.getprofile())

    with recording(all_threads=True) as record:
        thread = threading.Thread(target=work, name="stays")
        thread.start()
        entered.wait(30)
    leave.set()
    thread.join(30)
    assert not thread.is_alive()
    assert seen == [None]
    batch = record.batch()
    rows = [row for row, name in enumerate(batch["name"].tolist()) if masked(batch.names[name]) == "work"]
    assert [bool(batch["flags"].item(row) & Flag.UNFINISHED) for row in rows] == [True]
    assert "._leaf" not in tree(batch, "work")


def test_started_by_a_thread_that_has_ended():
    """The thread that started the recording is gone at the stop; its calls are there, and the stop is as any other."""
    begun = []

    def starts():
        context = recording(all_threads=True)
        record = context.__enter__()
        _leaf()
        begun.append((context, record))

    thread = threading.Thread(target=starts)
    thread.start()
    thread.join()
    context, record = begun.pop()
    _leaf()
    context.__exit__(None, None, None)
    assert sys.getprofile() is None
    assert tree(record.batch(), "starts").count("._leaf") == 1


def test_thread_outlives_two_recordings():
    """A thread that lives through two recordings is in both, with the calls of each only."""
    do, done, end = threading.Event(), threading.Event(), threading.Event()

    def serve():
        while not end.is_set():
            do.wait(30)
            do.clear()
            _leaf()
            done.set()

    def asks():
        done.clear()
        do.set()
        done.wait(30)

    thread = threading.Thread(target=serve, name="server")
    thread.start()
    try:
        batches = [recorded(asks) for _ in range(3)]
        asks()
    finally:
        end.set()
        do.set()
        thread.join(30)
    assert [tree(batch, "serve", "server").count("._leaf") for batch in batches] == [1, 1, 1]


_BORN = {
    "below threading": """
        def go():
            done = threading.Event()
            def body():
                _leaf()
                done.set()
            _thread.start_new_thread(body, ())
            done.wait(30)
    """,
    "in C": """
        import ctypes
        library = ctypes.CDLL(None)

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        def body(_argument):
            _leaf()

        def go():
            thread = ctypes.c_ulong()
            library.pthread_create(ctypes.byref(thread), None, body, None)
            library.pthread_join(thread, None)
    """,
}


@pytest.mark.parametrize("born", _BORN)
def test_threads_that_threading_does_not_know(born):
    """Threads born below `threading` or in C run and end as without the tracer; their calls are there all or not at all."""
    before = (
        "import _thread, threading\nfrom frame_trees import masked, recorded, tree\ndef _leaf(): return len('leaf')\n"
    )
    after = """
def program():
    for _ in range(20):
        go()
    _leaf()
batch = recorded(program, all_threads=True)
names = [masked(batch.names[name]) for name in batch["name"].tolist()]
print(names.count("_leaf"), names.count("body"), tree(batch, "program")[-2])
"""
    import textwrap

    leaves, bodies, last = printed(before + textwrap.dedent(_BORN[born]) + after)
    assert (leaves, bodies) in {("21", "20"), ("1", "0")}
    assert last == "._leaf"


_HAMMERED = """
    import sys, threading
    from frame_trees import recording, masked

    sys.setswitchinterval(1e-6)
    end = threading.Event()

    def leaf():
        return len("leaf")

    def calls(depth):
        if depth:
            calls(depth - 1)
        leaf()

    def works():
        while not end.is_set():
            calls(20)
            sum(each for each in range(5))

    def births():
        while not end.is_set():
            thread = threading.Thread(target=calls, args=[3])
            thread.start()
            thread.join()

    threads = [threading.Thread(target=target) for target in (works, works, births)]
    for thread in threads:
        thread.start()
    wrong = 0
    for number in range(200):
        with recording(all_threads=number % 2 == 0) as record:
            calls(3)
        batch = record.batch()
        here = batch.threads[0].ident, threading.get_ident()
        names = [
            masked(batch.names[name]) for name, thread in zip(batch["name"].tolist(), batch["thread"].tolist())
            if batch.threads[thread].ident == threading.get_ident()
        ]
        wrong += names.count("calls") != 4 or names.count("leaf") != 4
    end.set()
    for thread in threads:
        thread.join()
    print(wrong, sys.getprofile(), threading.getprofile())
"""


def test_start_and_stop_amid_busy_threads():
    """Two hundred starts and stops while threads work, start and end, at every switch the interpreter can make: all is right."""
    assert printed(_HAMMERED) == ["0", "None", "None"]


_ASKS_FOR_THE_LOCK = r"""
#include <pthread.h>
#include <stdatomic.h>

extern int PyGILState_Ensure(void);
extern void PyGILState_Release(int);

static atomic_int goes_on = 1;
static pthread_t threads[4];

static void* run(void* nothing) {
  while (atomic_load(&goes_on)) PyGILState_Release(PyGILState_Ensure());
  return nothing;
}

void begin(void) {
  for (int number = 0; number < 4; ++number) pthread_create(&threads[number], 0, run, 0);
}
void end(void) {
  atomic_store(&goes_on, 0);
  for (int number = 0; number < 4; ++number) pthread_join(threads[number], 0);
}
"""
_AMID_NATIVE_THREADS = """
    import ctypes, sys
    from otel_torchprof._record.recording import ProfileSegment
    from otel_torchprof._record.source import RecordingOptions

    sys.setswitchinterval(1e-5)
    native = ctypes.CDLL({library!r})
    native.begin()
    for _ in range(1000):
        record = ProfileSegment(RecordingOptions(operators=False, frames=True, all_threads=True))
        record.start()
        record.stop()
    native.end()
    print(record.batch().threads != [])
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here (cc) to build threads that are not Python's")
def test_start_while_native_threads_ask_for_the_lock(tmp_path):
    """CPython 3.11 lists a native thread before its state is filled in: who looks at its frames then crashes."""
    source, library = tmp_path / "asks.c", tmp_path / "asks.so"
    source.write_text(_ASKS_FOR_THE_LOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-pthread", "-o", library, source], check=True)
    assert printed(_AMID_NATIVE_THREADS.format(library=str(library))) == ["True"]


_STOPPED_ELSEWHERE = """
    import sys, threading
    from otel_torchprof._record.recording import ProfileSegment
    from otel_torchprof._record.source import RecordingOptions

    sys.setswitchinterval(1e-6)

    def leaf():
        return len("leaf")

    left = []
    def stops(record):
        record.stop()

    for number in range(200):
        record = ProfileSegment(RecordingOptions(operators=False, frames=True, all_threads=True))
        record.start()
        thread = threading.Thread(target=stops, args=[record])
        thread.start()
        for _ in range(number % 7):
            leaf()
        thread.join()
        left.append(sys.getprofile())
        record.batch()
    print({str(each) for each in left})
"""


def test_stopped_by_another_thread_in_the_middle_of_calls():
    """Stopped two hundred times by another thread at any moment of the calls here, the tracer is off here each time."""
    assert printed(_STOPPED_ELSEWHERE) == ["{'None'}"]


_SUBINTERPRETER = """
    try:
        import _interpreters as interpreters
    except ImportError:
        import _xxsubinterpreters as interpreters
    from frame_trees import masked, recorded, tree

    CODE = "def inside():\\n    return len('x')\\nfor _ in range(10):\\n    inside()\\n"

    def leaf():
        return len("leaf")

    before = interpreters.create()

    def program():
        created = interpreters.create()
        for each in (before, created):
            interpreters.run_string(each, CODE)
        interpreters.destroy(created)
        leaf()

    batch = recorded(program, all_threads=True)
    names = [masked(batch.names[name]) for name in batch["name"].tolist()]
    interpreters.run_string(before, CODE)
    interpreters.destroy(before)
    print(names.count("inside"), names.count("leaf"), tree(batch, "program")[-2])
"""


def test_other_interpreters_are_left_alone():
    """Interpreters of the same process that come, run and go are not traced, and nothing of theirs disturbs the recording."""
    assert printed(_SUBINTERPRETER) == ["0", "1", ".leaf"]


def _give_to_nobody(ident):
    """Takes the profile function of another thread away, as another tool does."""
    api, pointer = ctypes.pythonapi, ctypes.c_void_p
    api.PyInterpreterState_Get.restype = api.PyInterpreterState_ThreadHead.restype = pointer
    api.PyThreadState_Next.restype = api.PyThreadState_Get.restype = pointer
    here = api.PyThreadState_Get()
    state = api.PyInterpreterState_ThreadHead(pointer(api.PyInterpreterState_Get()))
    while state is not None:
        if state != here and ident in (pointer * 80).from_address(state):
            api._PyEval_SetProfile(pointer(state), None, None)
        state = api.PyThreadState_Next(pointer(state))


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="sys.monitoring has no function of a thread that could be taken"
)
def test_thread_whose_profile_function_another_thread_takes():
    """What is open on a thread ends where another thread takes its profile function, and not at the stop."""
    waits, goes_on = threading.Event(), threading.Event()

    def waiting():
        _leaf()
        waits.set()
        goes_on.wait()

    def work():
        waiting()

    with recording(all_threads=True) as record:
        thread = threading.Thread(target=work)
        thread.start()
        waits.wait()
        _give_to_nobody(thread.ident)
        taken = now_ns()
        goes_on.set()
        thread.join()
    batch = record.batch()
    rows = [row for row, name in enumerate(batch["name"].tolist()) if masked(batch.names[name]) in {"work", "waiting"}]
    assert len(rows) == 2
    assert all(batch["end"][row] < taken and not batch["flags"][row] & Flag.UNFINISHED for row in rows)
    assert record.health().notes == ("frames were cut short on 1 threads: another tool profiled them",)
