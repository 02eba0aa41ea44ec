"""Stacks of Python's threads as they are read: without Python's lock, while the threads run."""

import ctypes
import subprocess
import sys
import textwrap
import threading

import pytest

from otel_torchprof._native import blackbox
from otel_torchprof._native.ffi import python_sources
from otel_torchprof._native.stacks import KEPT_OF_LONGER, LONGEST


@pytest.fixture(scope="module", autouse=True)
def write():
    """Writes all stacks, that of a thread first, in so many bytes at most; without Python's lock, as ctypes calls it."""
    function = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint32)(
        blackbox.stacks_writer()
    )

    def call(os_tid, size):
        text = ctypes.create_string_buffer(size)
        written = function(os_tid, text, size)
        return text.raw[:written].decode()

    return call


def told(frame):
    """What Python says of the calls from that one outwards."""
    calls = []
    while frame is not None:
        calls.append((frame.f_code.co_filename[-LONGEST:], frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return calls


def seen():
    """The caller's stack as it is read and as Python has it."""
    return python_sources.read_stack(threading.get_native_id())[1:], told(sys._getframe(1))


def assert_same(found):
    read, expected = found
    assert len(expected) > 1
    assert read == expected


PLACES = """\
def générateur(see):
    yield from (see() for _ in [0])
def 関数(see): return [*générateur(see)][0]
def _𐍈(see): return (lambda key: sorted([0], key=lambda _: found.append(see())))(0)
found = []
_𐍈(see)
class Body:
    found.append(関数(see))
try:
    raise ValueError
except ValueError:
    found.append(see())
finally:
    found.append(see())
async def coroutine():
    with memoryview(b"") as _: found.append(see())
try: coroutine().send(None)
except StopIteration: pass
"""


@pytest.mark.parametrize(
    "path", ["train.py", "/pfad/mit ö/训练.py", "/deep" * 300 + "/🔥.py"], ids=["ascii", "two", "long"]
)
def test_calls_are_read_as_python_tells_them(path):
    """Of generators, comprehensions, lambdas that C calls, bodies of classes, handlers and coroutines, all files, lines and names agree."""
    places = {"see": seen}
    exec(compile(PLACES, path, "exec"), places)  # noqa: S102 - in a file of any name
    assert len(places["found"]) == 5
    for found in places["found"]:
        assert_same(found)


def test_every_line_of_a_long_function_is_found():
    """Lines far apart, in both directions, inside one statement, and behind a thousand others are those that Python has."""
    far = "\n" * 300
    code = f"def long(see):\n    found = [see(){far}, see(), {far}see()]\n    for _ in range(2):{far}        found.append(see())\n"
    code += (
        "    x = 1\n" * 1000
        + f"    found += [max({far}[0],{far}key=lambda _: found.append(see())) or see()]\n    return found\n"
    )
    space = {}
    exec(compile(code, "long.py", "exec"), space)  # noqa: S102 - of a thousand lines
    found = space["long"](seen)
    assert len({expected[0][1] for _, expected in found}) == 5
    for each in found:
        assert_same(each)


def test_of_a_deep_stack_the_latest_calls_are_read():
    """Of more calls than are read at most, the latest are there."""

    def deep(n):
        return seen() if n == 0 else deep(n - 1)

    read, expected = deep(LONGEST + 50)
    assert read == expected[: KEPT_OF_LONGER - 1]


def test_another_threads_stack_is_read():
    """A thread that waits is found by its system's id, with the calls that Python says it is in; one that has ended is not."""
    started, may_end = threading.Event(), threading.Event()

    def wait():
        started.set()
        may_end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    while "wait" not in [name for _, _, name in told(sys._current_frames()[thread.ident])[1:]]:
        pass  # it is in the event's own method only a moment later
    read, expected = python_sources.read_stack(thread.native_id), told(sys._current_frames()[thread.ident])
    may_end.set()
    thread.join()
    assert read == expected
    assert python_sources.read_stack(thread.native_id) == []


def test_stacks_are_cut_to_what_there_is_room_for(write):
    """However little room there is, the text fits, begins with the thread that was asked for, and has whole lines."""
    here = threading.get_native_id()
    whole, *cut = (write(here, size) for size in (1 << 16, 0, 10, 100, 1000))
    assert whole.startswith(f"Thread {here} (most recent call first):\n  File ")
    for text, size in zip(cut, (0, 10, 100, 1000), strict=True):
        assert len(text.encode()) <= size
        assert whole.splitlines()[: text.count("\n")] == text.splitlines()


BUSY = """\
import ctypes, re, sys, threading
from otel_torchprof._native import blackbox

write = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint32)(blackbox.stacks_writer())
sys.setswitchinterval(1e-5)
is_over = False

def deeper(n): return n if n == 0 else deeper(n - 1)

def work():
    while not is_over:
        deeper(200)
        exec("def made(a):\\n return sum([i for i in range(a)])\\nmade(50)", {})
        any(deeper(i) for i in range(5))

def churn():
    while not is_over:
        thread = threading.Thread(target=deeper, args=(100,))
        thread.start()
        thread.join()

threads = [threading.Thread(target=target) for target in (work, work, work, churn)]
for thread in threads: thread.start()
room, texts = ctypes.create_string_buffer(1 << 16), []
for _ in range(200):
    size = write(threads[0].native_id, room, len(room))
    texts.append(room.raw[:size].decode())
is_over = True
for thread in threads: thread.join()
calls = {call for text in texts for call in re.findall(r'^  File "(?:<string>|.*busy.py)", line \\d+ in (.*)$', text, re.M)}
assert {"work", "deeper"} <= calls, calls
assert calls <= {"work", "deeper", "made", "churn", "<module>", "<genexpr>", "<listcomp>"}, calls
heads = r'Thread \\d+ \\(most recent call first\\):|  File ".*", line \\d+ in .*| *\\(.*\\)|  \\.\\.\\.'
assert all(re.fullmatch(heads, line) for text in texts for line in text.splitlines())
print("alive")
"""


def run(tmp_path, name, code):
    program = tmp_path / name
    program.write_text(code)
    return subprocess.run([sys.executable, str(program)], check=False, capture_output=True, text=True, timeout=600)


def test_threads_that_call_and_end_meanwhile_do_no_harm(tmp_path):
    """While frames, code and threads come and go, the program lives, and every call that is written is one that there was."""
    result = run(tmp_path, "busy.py", BUSY)
    assert (result.returncode, result.stdout) == (0, "alive\n"), result.stderr


STATE = """\
{}
from otel_torchprof._files.box import BlackBox
from otel_torchprof.parsers import black_box

box = BlackBox(black_box("ops,2M,hang=100"))
box.start()
print(box.state)
box.stop()
"""
REFUSED = """\
import ctypes, os, struct
number = {"x86_64": 310, "aarch64": 270}[os.uname().machine]
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]  # this call: EPERM
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
"""


@pytest.mark.parametrize(
    ("before", "problem"),
    [
        (REFUSED, "the system does not permit process_vm_readv: Operation not permitted"),
        ("import sys; sys.hexversion = 0x030900F0", "this interpreter's frames are not where they are known to be"),
    ],
    ids=["refused", "unknown"],
)
def test_where_stacks_cannot_be_read_the_box_says_so(tmp_path, before, problem):
    """Where the system refuses the call, or frames are not as they are known, hangs are watched for without stacks, and the state says why."""
    result = run(tmp_path, "program.py", textwrap.dedent(STATE).format(before))
    assert result.stdout == f"on, without Python's stacks of hangs: {problem}\n", result.stderr
