"""The tracer of calls on threads that come and go as they like, born in Python, below it, or in C."""

import _thread
import ctypes
import itertools
import shutil
import subprocess
import sys
import threading
from collections import Counter

import pytest
from frame_runs import printed
from frame_trees import calls, flags_of, names_of, recorded, recording, tree

from otel_torchprof._columns.schema import Flag
from otel_torchprof._native.recorder import now_ns

THREADS = 50
LEN = [".<built-in function len>"]


def _leaf():
    return len("leaf")


def _of_other_threads(prof):
    """How often ``_leaf`` was called, for each thread but this one that does; by number, as ended ones have no name."""
    names, threads, here = names_of(prof), prof.threads, threading.get_ident()
    found = Counter(
        thread
        for name, thread in zip(names, prof.columns["thread"].tolist(), strict=True)
        if name == "_leaf" and threads[thread].ident != here
    )
    return list(found.values())


@pytest.mark.parametrize("all_threads", [False, True])
def test_threads_that_start_and_end_meanwhile(all_threads):
    """Fifty threads, most of which end before the next one starts, have each its own call, once, and nothing unfinished."""

    def program():
        threads = [threading.Thread(target=_leaf) for _ in range(THREADS)]
        for number, thread in enumerate(threads):
            thread.start()
            if number % 5:
                thread.join()
        for thread in threads:
            thread.join()

    prof = recorded(program, all_threads=all_threads)
    assert _of_other_threads(prof) == [1] * THREADS
    assert tree(prof, "_leaf") == LEN * THREADS
    assert not any(flag & Flag.UNFINISHED for flag in flags_of(prof, "_leaf"))
    assert threading.getprofile() is None


def test_thread_that_ends_after_the_stop():
    """A thread that is in the middle of a call at the stop has it as unfinished, goes on untraced, and ends."""
    entered, leave, seen = threading.Event(), threading.Event(), []

    def work():
        entered.set()
        leave.wait(30)
        _leaf()
        seen.append(sys.getprofile())

    with recording(all_threads=True) as prof:
        thread = threading.Thread(target=work, name="stays")
        thread.start()
        entered.wait(30)
    leave.set()
    thread.join(30)
    assert not thread.is_alive()
    assert seen == [None]
    assert [flag & Flag.UNFINISHED for flag in flags_of(prof, "work")] == [Flag.UNFINISHED]
    assert "._leaf" not in tree(prof, "work")


def test_thread_that_starts_and_one_that_stops():
    """The thread that starts a profile may be gone at the stop, which another one may make: calls are there, and the tracer is off."""
    prof = calls(all_threads=True)

    def starts():
        prof.start()
        _leaf()

    for target in (starts, prof.stop):
        _leaf()
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert sys.getprofile() is None
    assert tree(prof, "starts").count("._leaf") == 1
    assert names_of(prof).count("_leaf") == 2


def test_thread_outlives_several_profiles():
    """A thread that is there before and after has in each profile the calls of that, below what was on its stack, and is left clean."""
    do, done, end, after = threading.Event(), threading.Event(), threading.Event(), []

    def serve():
        while not end.is_set():
            do.wait(30)
            do.clear()
            _leaf()
            after.append(sys.getprofile())
            done.set()

    def asks():
        done.clear()
        do.set()
        done.wait(30)

    thread = threading.Thread(target=serve, name="server")
    thread.start()
    try:
        profs = [recorded(asks) for _ in range(3)]
        asks()
    finally:
        end.set()
        do.set()
        thread.join(30)
    for prof in profs:
        assert tree(prof, "serve", "server").count("._leaf") == 1
        assert tree(prof, "run", "server")[0] == ".serve"
    assert after[3] is None


def test_stack_of_another_thread():
    """What is on another thread's stack is open from the start of the profile: up to 128 calls, the innermost."""
    ready, go = threading.Event(), threading.Event()

    def deep(depth):
        if depth:
            return deep(depth - 1)
        ready.set()
        go.wait(30)
        return _leaf()

    thread = threading.Thread(target=deep, args=[300])
    thread.start()
    assert ready.wait(30)
    with recording() as prof:
        go.set()
        thread.join(30)
    names, columns = names_of(prof), prof.columns
    rows = [row for row, name in enumerate(names) if name == "deep"]
    assert 120 < len(rows) <= 128
    assert len({columns["start"].item(row) for row in rows}) == 1
    assert columns["start"][rows[0]] <= columns["start"][names.index("_leaf")]
    assert all((columns["end"][outer] >= columns["end"][inner]) for outer, inner in itertools.pairwise(rows))


def test_threads_that_threading_does_not_know():
    """Threads born below `threading` or in C run and end as without the tracer; their calls are there all or not at all."""
    done = threading.Semaphore(0)

    def below():
        _leaf()
        done.release()

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    def in_c(_argument):
        _leaf()

    def program():
        library, thread = ctypes.CDLL(None), ctypes.c_ulong()
        for _ in range(20):
            _thread.start_new_thread(below, ())
            done.acquire()
            library.pthread_create(ctypes.byref(thread), None, in_c, None)
            library.pthread_join(thread, None)
        _leaf()

    prof = recorded(program, all_threads=True)
    for name in ("below", "in_c"):
        assert tree(prof, name).count("._leaf") == names_of(prof).count(name)
        assert names_of(prof).count(name) in {0, 20}
    assert names_of(prof).count("below") == 20 or sys.version_info < (3, 12)
    assert tree(prof, "program")[-2] == "._leaf"


_HAMMERED = """
    import sys, threading
    from frame_trees import calls, names_of, recording

    sys.setswitchinterval(1e-6)
    end, wrong = threading.Event(), 0

    def leaf():
        return len("leaf")

    def nested(depth):
        if depth:
            nested(depth - 1)
        leaf()

    def works():
        while not end.is_set():
            nested(20)
            sum(each for each in range(5))

    def births():
        while not end.is_set():
            thread = threading.Thread(target=nested, args=[3])
            thread.start()
            thread.join()

    threads = [threading.Thread(target=target) for target in (works, works, births)]
    for thread in threads:
        thread.start()
    for number in range(100):
        with recording(all_threads=number % 2 == 0) as prof:
            nested(3)
        here = names_of(prof, threading.current_thread().name)
        wrong += here.count("nested") != 4 or here.count("leaf") != 4
    end.set()
    for thread in threads:
        thread.join()
    for number in range(200):
        prof = calls(all_threads=True)
        prof.start()
        thread = threading.Thread(target=lambda: prof.stop())
        thread.start()
        for _ in range(number % 7):
            leaf()
        thread.join()
        wrong += sys.getprofile() is not None
    print(wrong, sys.getprofile(), threading.getprofile())
"""


def test_start_and_stop_amid_busy_threads():
    """Starts and stops while threads work, start and end, and stops by another thread amid calls: all is right, and off each time."""
    assert printed(_HAMMERED, is_new=True) == ["0", "None", "None"]


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
    import otel_torchprof as otp

    sys.setswitchinterval(1e-5)
    native = ctypes.CDLL({library!r})
    native.begin()
    for _ in range(1000):
        prof = otp.profile(operators=False, with_stack=True, all_threads=True)
        prof.start()
        prof.stop()
    native.end()
    print(prof.threads != [])
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here (cc) to build threads that are not Python's")
def test_start_while_native_threads_ask_for_the_lock(tmp_path):
    """CPython 3.11 lists a native thread before its state is filled in: who looks at its frames then crashes."""
    source, library = tmp_path / "asks.c", tmp_path / "asks.so"
    source.write_text(_ASKS_FOR_THE_LOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-pthread", "-o", library, source], check=True)
    assert printed(_AMID_NATIVE_THREADS.format(library=str(library))) == ["True"]


_SUBINTERPRETER = """
    try:
        import _interpreters as interpreters
    except ImportError:
        import _xxsubinterpreters as interpreters
    from frame_trees import names_of, recorded, tree

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

    prof = recorded(program, all_threads=True)
    names = names_of(prof)
    interpreters.run_string(before, CODE)
    interpreters.destroy(before)
    print(names.count("inside"), names.count("leaf"), tree(prof, "program")[-2])
"""


def test_other_interpreters_are_left_alone():
    """Interpreters of the same process that come, run and go are not traced, and nothing of theirs disturbs the profile."""
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

    with recording(all_threads=True) as prof:
        thread = threading.Thread(target=work)
        thread.start()
        waits.wait()
        _give_to_nobody(thread.ident)
        taken = now_ns()
        goes_on.set()
        thread.join()
    rows = [row for row, name in enumerate(names_of(prof)) if name in {"work", "waiting"}]
    assert len(rows) == 2
    columns = prof.columns
    assert all(columns["end"][row] < taken and not columns["flags"][row] & Flag.UNFINISHED for row in rows)
    assert prof.health.notes == ("frames were cut short on 1 threads: another tool profiled them",)
