"""Samples of Python stacks: which line of a loop's thread they name, and what threads, forks and interpreters do to them."""

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import otel_torchprof as otp
from otel_torchprof import config
from otel_torchprof._columns.samples import WAITS_FOR_LOCK
from otel_torchprof._native import stacks
from otel_torchprof._native.stacks import STACKS, TAKEN, Sampling
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.samples_source import StackSamples
from otel_torchprof._record.source import RecordingOptions

DEADLINE = 30.0


def until(done):
    """Runs Python until a condition holds."""
    end = time.monotonic() + DEADLINE
    while not done():
        assert time.monotonic() < end, "not in time"


def sampled(work, *, least=30, **options):
    """The innermost calls in samples of this thread while it calls a function, at least so many, with their durations."""
    sampling = Sampling(1000.0, here=True)
    found = []

    def is_enough():
        work()
        found.append(sampling.take(1 << 62))
        return sum(map(len, found)) >= least

    until(is_enough)
    sampling.stop()
    return np.concatenate(found)


def lines(taken, *functions):
    """Shares of functions: of the samples with a call of each anywhere in the stack."""
    whole = taken["duration"].sum()
    names = [{call.function for call in STACKS[stack]} for stack in taken["stack"].tolist()]
    return [taken["duration"][[function in of for of in names]].sum() / whole for function in functions]


def spin(count):
    total = 0
    for i in range(count):
        total += i * i
    return total


def blocks():
    sorted(range(100_000))


def test_a_loop_is_named_by_file_line_and_function():
    """Samples of a busy function name its file, its own lines and its callers up to the module's, with times that rise."""
    taken = sampled(lambda: spin(1000))
    stacks = [STACKS[stack] for stack in taken["stack"].tolist()]
    inside = [stack[0] for stack in stacks if stack[0].function == "spin"]
    first = spin.__code__.co_firstlineno
    assert inside
    assert {call.file for call in inside} == {__file__}
    assert {call.line for call in inside} <= set(range(first, first + 5))
    assert all("until" in [call.function for call in stack] for stack in stacks if stack[0].function == "spin")
    assert (np.diff(taken["time"]) > 0).all()
    assert abs(taken["time"][-1] - time.time_ns()) < DEADLINE * 1e9
    assert {(taken["ident"][0], taken["os_tid"][0])} == {(threading.get_ident(), threading.get_native_id())}


def test_a_call_that_holds_the_lock_is_seen():
    """Most of the time of a loop that nearly only sorts in C, with the interpreter's lock held, is at the line of the sort."""
    at_line = lines(sampled(blocks), "blocks")[0]
    assert at_line > 0.5


def hog(stop):
    while not stop.is_set():
        sum(number for number in range(200))


@pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="the system does not show system calls of threads")
def test_the_thread_that_has_the_lock():
    """A sample of a thread that waits for the interpreter's lock has the line of the thread that has it as its innermost call."""
    stop, held = threading.Event(), []
    thread = threading.Thread(target=hog, args=(stop,), daemon=True)
    thread.start()
    sampling = Sampling(1000.0, here=True)

    def is_enough():
        spin(1000)
        stacks = [STACKS[stack] for stack in sampling.take(1 << 62)["stack"].tolist()]
        waiting = [stack for stack in stacks if stack and stack[0].file.startswith(WAITS_FOR_LOCK)]
        held.extend(stack for stack in waiting if stack[0].function == hog.__name__)  # else it has just begun
        return len(held) >= 5

    until(is_enough)
    stop.set()
    thread.join()
    sampling.stop()
    first = hog.__code__.co_firstlineno
    assert {call.file for call, *_ in held} == {f"{WAITS_FOR_LOCK} {__file__}"}
    assert {call.line for call, *_ in held} <= {first + 1, first + 2}
    assert all("test_the_thread_that_has_the_lock" in [call.function for call in stack] for stack in held)


def recursive(depth):
    return spin(20_000) if depth == 0 else recursive(depth - 1)


def test_deep_recursion_keeps_its_innermost_calls():
    """Far below 512 calls a stack is whole; beyond that, it has the innermost ones."""
    sys.setrecursionlimit(5000)
    for depth, least, most in ((200, 201, 300), (1500, 64, 64)):
        taken = sampled(lambda depth=depth: recursive(depth), least=100)
        stacks = [STACKS[stack] for stack in taken["stack"].tolist()]
        lengths = {len(stack) for stack in stacks if stack[0].function == "spin"}
        assert lengths
        assert min(lengths) >= least
        assert max(lengths) <= most


def generator(count):
    for _ in range(count):
        yield spin(50)


def test_generators_keep_their_callers():
    """A function that a generator calls is nested in the generator and its caller; no stack begins with a generator."""
    taken = sampled(lambda: sum(generator(20)), least=100)
    stacks = [[call.function for call in STACKS[stack]] for stack in taken["stack"].tolist()]
    seen = [names for names in stacks if "generator" in names]
    assert seen
    assert all(names[-1] == stacks[0][-1] for names in stacks)


def test_code_that_is_freed_keeps_its_names():
    """Functions that are compiled, called and freed again and again are named, each with its own name and line."""
    names = set()

    def work():
        at = len(names) % 7
        space = {"spin": spin}
        exec(compile("\n" * at + f"def made_{at}():\n    spin(300)\n", f"made_{at}.py", "exec"), space)  # noqa: S102
        names.add(space[f"made_{at}"].__name__ + str(len(names)))
        space[f"made_{at}"]()

    taken = sampled(work, least=100)
    calls = {call for stack in taken["stack"].tolist() for call in STACKS[stack] if call.file.startswith("made_")}
    assert calls
    for call in calls:
        at = int(call.file[len("made_") : -len(".py")])
        begin = {("<module>", 0), ("<module>", 1)}  # before its first statement
        assert (call.function, call.line) in {
            (f"made_{at}", at + 2),
            (f"made_{at}", at + 1),
            ("<module>", at + 1),
        } | begin


def test_threads_end_while_they_are_sampled():
    """Threads that profile themselves and end, many after one another, leave the sampler as it was."""

    def work():
        with otp.profile(operators=False, sampling=1000):
            spin(500)

    for _ in range(30):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(sampled(lambda: spin(1000), least=5)) >= 5


def test_storms_of_starts_and_stops():
    """Samplings that start, stop and are freed in any order have no samples of before or after, and need no time."""
    kept = []
    for at in range(500):
        sampling = Sampling(1000.0, here=at % 2 == 0)
        if at % 3:
            sampling.stop()
        kept.append(sampling)
        if at % 5 == 0:
            kept.clear()
    for sampling in kept:
        sampling.stop()
        assert sampling.take(1 << 62).dtype == TAKEN


def profiled(seconds, **options):
    with otp.profile(operators=False, **options) as prof:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            spin(500)
    return prof._segments.batch()


def test_a_profile_has_samples_of_its_thread():
    """Its batch has them between its start and stop, with its thread among the batch's, and none of our own calls."""
    batch = profiled(0.3, sampling=1000)
    samples = batch.samples
    assert len(samples)
    assert [batch.threads[at].ident for at in set(samples.thread.tolist())] == [threading.get_ident()]
    assert samples.duration.min() >= 0
    assert samples.duration.sum() < 5e9
    own = otp.__file__.removesuffix("__init__.py")
    assert not any(call.file.startswith(own) for stack in set(samples.stack.tolist()) for call in samples.stacks[stack])


def test_no_sampling():
    """With False or 0 nothing is sampled, and nothing says that it is off."""
    for sampling in (False, 0):
        with otp.profile(operators=False, sampling=sampling) as prof:
            spin(1000)
        assert prof._segments.batch().samples is None
        assert "samples" not in str(prof.health)


def test_hidden_code_is_not_sampled(monkeypatch):
    """Where an attribute of code is hidden, no stack is taken, and health has the reason."""
    monkeypatch.setenv(config.HIDDEN_ATTRIBUTES.variable, "code.file.path")
    with otp.profile(operators=False) as prof:
        spin(1000)
    assert prof._segments.batch().samples is None
    assert "samples off: OTEL_TORCHPROF_HIDDEN_ATTRIBUTES has code.file.path" in prof.health.notes


@pytest.mark.parametrize("value", [-1, 1001, "often", None.__class__])
def test_a_bad_rate_is_refused(value):
    """A rate that is none is an error with its name, its value and what is allowed."""
    with pytest.raises((TypeError, ValueError), match=r"sampling.*a number of samples a second from 0 to 1000"):
        otp.profile(operators=False, sampling=value)


def test_two_recordings_at_once_have_each_its_own():
    """Two profiles on two threads see only their own; one of all threads sees both, and takes nothing from them."""
    found, both = {}, threading.Barrier(2)

    def work(name):
        both.wait()
        found[name] = profiled(0.3, sampling=1000)

    whole = ProfileSegment(RecordingOptions(operators=False, all_threads=True, sources={"sampling": 1000}))
    whole.start()
    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole.stop()
    for at, thread in enumerate(threads):
        batch = found[at]
        assert {batch.threads[row].ident for row in set(batch.samples.thread.tolist())} == {thread.ident}
    batch = whole.batch()
    seen = {batch.threads[row].ident for row in set(batch.samples.thread.tolist())}
    assert {threading.get_ident()} < seen <= {threading.get_ident(), *(thread.ident for thread in threads)}


def test_a_live_reader_gets_each_sample_once():
    """Batches that are drained one after the other have all samples before their watermarks, in order, none twice."""
    segment = ProfileSegment(RecordingOptions(operators=False, sources={"sampling": 1000}))
    segment.start()
    times = []

    def is_enough():
        spin(2000)
        batch = segment.drain()
        if batch.samples is not None:
            assert (batch.samples.time < batch.watermark).all()
            times.extend(batch.samples.time.tolist())
        return len(times) > 50

    until(is_enough)
    segment.stop()
    assert times == sorted(set(times))


PROGRAMS = {
    "exit": """
        import threading, otel_torchprof as otp
        def work():
            with otp.profile(operators=False, sampling=1000):
                while True: sum(range(1000))
        threading.Thread(target=work, daemon=True).start()
        prof = otp.profile(operators=False, sampling=1000)
        prof.start()
        for _ in range(300): sum(range(10000))
        print("alive")
    """,
    "fork": """
        import os, otel_torchprof as otp
        from otel_torchprof._native.stacks import STACKS, Sampling
        def spin(n): return sum(i * i for i in range(n))
        def samples():
            sampling, found = Sampling(1000.0, here=True), []
            while not found:
                spin(2000)
                found = sampling.take(1 << 62)["stack"].tolist()
            return STACKS[found[-1]]
        with otp.profile(operators=False, sampling=1000):
            before = len(samples()), len(STACKS)
            for _ in range(20):
                pid = os.fork()
                if pid == 0:
                    assert len(STACKS) >= before[1] and STACKS[1]
                    stack = samples()
                    assert stack[-1].function == "<module>", stack
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
            assert samples()[-1].function == "<module>"
        print("alive")
    """,
    "import": """
        import threading, otel_torchprof, pathlib
        names = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
        assert "otel-torchprof" not in names, names
        print("alive")
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_end_as_they_should(name, tmp_path):
    """Exit with samplings that run, forks while the sampler works, and an import alone do what they do without us."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAMS[name]))
    result = subprocess.run([sys.executable, str(program)], check=False, capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stdout) == (0, "alive\n"), result.stderr


def test_threads_that_start_do_not_delay_the_next_look():
    """While threads with loops begin all the time, samples are taken as before."""
    sampling = Sampling(200.0, here=False)
    stacks.sample_loop()
    found = []

    def is_enough():
        thread = threading.Thread(target=stacks.sample_loop)
        thread.start()
        thread.join()
        taken = sampling.take(1 << 62)
        found.append(int((taken["ident"] == threading.get_ident()).sum()))
        return sum(found) >= 20 or len(found) == 2000

    until(is_enough)
    sampling.stop()
    assert sum(found) >= 20


def test_samples_of_another_thread_with_the_same_ident_are_not_taken():
    """A sampling of a thread that has ended has none of a later thread, though the system gives it the same numbers."""
    samplings = []

    def begin():
        samplings.append(Sampling(1000.0, here=True))
        spin(20_000)

    first = threading.Thread(target=begin)
    first.start()
    first.join()
    samplings[0].take(1 << 62)
    second = threading.Thread(target=lambda: sampled(lambda: spin(1000)))
    second.start()
    second.join()
    assert not len(samplings[0].take(1 << 62))
    samplings[0].stop()


RESUMED_BY = {
    "next phase": lambda _sampling: stacks.sample_loop(),
    "next look at samples": lambda sampling: sampling.take(1 << 62),
    "handler in the parent": lambda _sampling: stacks.python_sources.resume_samples(),
}


@pytest.mark.parametrize("resumed_by", RESUMED_BY)
def test_a_fork_ends_the_native_thread_for_a_while(resumed_by):
    """Right before a fork the native thread is joined, so that the child has whole stacks; what comes next starts it again."""

    def native_threads():
        return {path.name for path in Path("/proc/self/task").iterdir()}

    sampling = Sampling(1000.0, here=True)
    running = native_threads()
    stacks.python_sources.pause_samples()
    until(lambda: running - native_threads())  # those of an earlier test may end too
    paused = native_threads()
    RESUMED_BY[resumed_by](sampling)
    assert len(native_threads() - paused) == 1
    found = []

    def is_enough():
        spin(1000)
        found.append(len(sampling.take(1 << 62)))
        return sum(found) >= 5

    until(is_enough)
    sampling.stop()


def test_losses_are_in_health():
    """Samples that were dropped, and those that lack calls since there are too many different ones, are each a note."""
    source = StackSamples(1000.0, all_threads=False, is_live=False)
    assert source.notes() == []
    source.start(None)
    spin(1000)
    source.stop()
    assert source.notes() == []
    source._sampling.lost, source._sampling.cut = 3, 4
    assert source.notes() == [
        "3 samples of Python stacks were dropped: they were not read in time",
        "4 samples of Python stacks name callers only: the process has too many different calls",
    ]
