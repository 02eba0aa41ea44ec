"""SIGTERM in instrumented programs, each in a process of its own: what was kept, and how the process ended."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import forked_programs
import pytest

import otel_torchprof as otp
from otel_torchprof._instrument.sigterm import SigtermFlush
from otel_torchprof._native.ffi import lib
from otel_torchprof._process import threads

LONG = 60.0
NEVER = 3600.0
KILLED = -signal.SIGTERM

PREAMBLE = """
import atexit, ctypes, multiprocessing, os, signal, sys, threading
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
import otel_torchprof as otp

def say(text):
    os.write(1, f"{text}\\n".encode())

class Said(SpanExporter):
    def export(self, spans):
        for span in spans:
            say(span.name)
        return SpanExportResult.SUCCESS

class Hanging(SpanExporter):
    def export(self, spans):
        say("export")
        threading.Event().wait()

def instrument(exporter=None, provider=None, detail="ops", **options):
    provider = provider or TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(otp.TorchSpanProcessor(exporter or Said(), schedule_delay_millis=3_600_000))
    otp.TorchInstrumentor().instrument(
        tracer_provider=provider, detail=detail, gpu_metrics=False, skip_dep_check=True, **options
    )
    return provider

def work(name):
    with otp.record_function(name):
        pass

def is_caught():
    with open("/proc/self/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

def wait_in(library):
    "In a C function that never returns, whatever signals come, and says so itself."
    mutex, condition = (ctypes.create_string_buffer(256) for _ in range(2))
    library.pthread_mutex_lock(mutex)
    library.write(1, b"ready\\n", 6)
    library.pthread_cond_wait(condition, mutex)

def terminate_me():
    os.kill(os.getpid(), signal.SIGTERM)

def wait_for_ever():
    while True:
        signal.pause()
"""


def started(program: str, timeout: float, *before: str) -> subprocess.Popen[str]:
    """A process that runs it, with so many seconds for a flush."""
    command = [*before, sys.executable, "-c", f"{PREAMBLE}\nTIMEOUT = {timeout}\n{program}"]
    start = subprocess.Popen if before else forked_programs.Popen
    return start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[list[str], int]:
    """What it said, and its exit status."""
    try:
        said, errors = process.communicate(timeout=LONG)
    finally:
        process.kill()
    assert "Traceback" not in errors, errors
    return said.split(), process.returncode


def terminated(program: str, timeout: float = NEVER) -> tuple[list[str], int]:
    """The same, of one that gets SIGTERM when it says that it is ready."""
    process = started(program, timeout)
    assert process.stdout is not None
    before = list(iter(lambda: process.stdout.readline().strip(), "ready"))
    process.terminate()
    said, status = ended(process)
    return [*before, *said], status


def test_in_a_c_call_that_never_returns_everything_is_sent():
    """What has ended and what is still open is sent without the main thread, and the process dies of SIGTERM."""
    program = """
instrument(sigterm_timeout=TIMEOUT)
work("done")
with otp.record_function("open"):
    wait_in(ctypes.CDLL(None))
"""
    said, status = terminated(program)
    assert (sorted(set(said)), status) == (["done", "open"], KILLED)


def test_where_the_gil_is_not_to_be_had_the_deadline_ends_the_process():
    """A C call that keeps the GIL keeps the flush from running, and the process no longer than the deadline."""
    program = """
instrument(sigterm_timeout=TIMEOUT)
work("lost")
sys.setswitchinterval(1000)
wait_in(ctypes.PyDLL(None))
"""
    assert terminated(program, timeout=0.3) == ([], KILLED)


def test_an_exporter_that_hangs_is_left_at_the_deadline():
    """A flush that does not end is not waited for beyond the deadline."""
    program = 'instrument(Hanging(), sigterm_timeout=TIMEOUT)\nwork("lost")\nsay("ready")\nwait_for_ever()'
    assert terminated(program, timeout=1.0) == (["export"], KILLED)


def test_a_second_sigterm_ends_the_process_at_once():
    """Who sends it again while the flush hangs does not wait for the deadline."""
    process = started(
        'instrument(Hanging(), sigterm_timeout=TIMEOUT)\nwork("lost")\nsay("ready")\nwait_for_ever()', NEVER
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.stdout.readline() == "export\n"
    for _ in range(round(LONG / 0.25)):
        process.terminate()
        try:
            process.wait(0.25)
        except subprocess.TimeoutExpired:
            continue
        break
    assert ended(process) == ([], KILLED)


@pytest.mark.parametrize(
    ("program", "said", "status"),
    [
        ("signal.signal(signal.SIGTERM, own)\ninstrument(sigterm_timeout=TIMEOUT)\n", ["own"], 3),
        ("instrument(sigterm_timeout=TIMEOUT)\nsignal.signal(signal.SIGTERM, own)\n", ["own"], 3),
        ("instrument(sigterm_timeout=TIMEOUT)\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\n", [], KILLED),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ninstrument(sigterm_timeout=TIMEOUT)\n", ["ignored"], 0),
        ("instrument(sigterm_timeout=0)\n", [], KILLED),
        ("os.environ['OTEL_TORCHPROF_SIGTERM_TIMEOUT'] = '0'\ninstrument()\n", [], KILLED),
        ("os.environ['OTEL_TORCHPROF_SIGTERM_TIMEOUT'] = str(TIMEOUT)\ninstrument()\n", ["span"], KILLED),
    ],
    ids=["handler before", "handler after", "default after", "ignored", "off", "off by variable", "on by variable"],
)
def test_the_programs_own_word_counts(program, said, status):
    """Handlers and ignored signals are untouched, a later signal.signal wins, and both keyword and variable switch it off."""
    own = 'def own(*_):\n    say("own")\n    os._exit(3)\n'
    rest = 'work("span")\nterminate_me()\nif signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:\n    say("ignored"); os._exit(0)\nwait_for_ever()'
    found, ended_with = ended(started(own + program + rest, NEVER))
    assert (found, ended_with) == (said, status)


@pytest.mark.parametrize("is_loaded_inside", [False, True], ids=["instrumented before", "instrumented inside"])
def test_a_server_that_raises_the_signal_again_loses_nothing(is_loaded_inside):
    """A server such as uvicorn handles SIGTERM, puts the action from before back, and raises the signal: all is sent, and the process ends of it."""
    program = """
def serve():
    if INSIDE:
        instrument(sigterm_timeout=TIMEOUT)
    work("request")
    terminate_me()
    captured.wait()

captured = threading.Event()
if not INSIDE:
    instrument(sigterm_timeout=TIMEOUT)
before = signal.signal(signal.SIGTERM, lambda *_: captured.set())
serve()
say(before is signal.SIG_DFL)
signal.signal(signal.SIGTERM, before)
signal.raise_signal(signal.SIGTERM)
"""
    found = ended(started(f"INSIDE = {is_loaded_inside}\n{program}", NEVER))
    assert found == (["True", "request"], KILLED)


def test_nothing_is_seen_of_it_and_uninstrument_takes_it_back():
    """Python's view of signals stays the same, and after uninstrument() the action and the threads are as before."""
    program = """
threads, action = threading.active_count(), signal.signal
for _ in range(3):
    instrument(sigterm_timeout=TIMEOUT)
    say(is_caught())
    say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1)
    otp.TorchInstrumentor().uninstrument()
    say(is_caught() or any("sigterm" in thread.name for thread in threading.enumerate()))
say(signal.signal is action)
terminate_me()
"""
    assert ended(started(program, NEVER)) == (["True", "True", "False"] * 3 + ["True"], KILLED)


def test_uninstrument_leaves_a_handler_of_the_program():
    """A handler that was set meanwhile stays."""
    program = """
instrument(sigterm_timeout=TIMEOUT)
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
otp.TorchInstrumentor().uninstrument()
terminate_me()
wait_for_ever()
"""
    assert ended(started(program, NEVER)) == ([], 3)


def test_a_forked_child_dies_at_once():
    """Process.terminate() ends a worker whose exporter hangs; it has the default action, until it instruments itself."""
    program = """
instrument(Hanging(), sigterm_timeout=TIMEOUT)
fork = multiprocessing.get_context("fork")

def recording(pipe, again):
    if again:
        otp.TorchInstrumentor().uninstrument()
        instrument(Said(), sigterm_timeout=TIMEOUT)
    work("child")
    pipe.send(is_caught())
    wait_for_ever()

for again in (False, True):
    here, there = fork.Pipe()
    worker = fork.Process(target=recording, args=(there, again))
    worker.start()
    say(here.recv())
    worker.terminate()
    worker.join()
    say(worker.exitcode)
say(is_caught())
os._exit(0)
"""
    killed = str(KILLED)
    said, status = ended(started(program, NEVER))
    assert status == 0
    assert said == ["False", killed, "True", "child", killed, "True"]


def test_a_program_that_ends_meanwhile_ends_of_the_signal():
    """A main thread that comes to its end during the flush does not cut it off, and the exit status is the signal's."""
    program = """
at_exit = threading.Event()

class Late(Said):
    def export(self, spans):
        flushing.set()
        at_exit.wait()
        return super().export(spans)

flushing = threading.Event()
atexit.register(at_exit.set)
instrument(Late(), sigterm_timeout=TIMEOUT)
work("kept")
terminate_me()
flushing.wait()
"""
    said, status = ended(started(program, NEVER))
    assert (set(said), status) == ({"kept"}, KILLED)


def test_the_applications_spans_and_metrics_are_sent_too():
    """The span around torch's and what its MeterProvider has are sent; with detail="metrics" the application's are all there is."""
    program = """
class Reader(InMemoryMetricReader):
    def force_flush(self, timeout_millis=10_000):
        self.collect()
        found = self.get_metrics_data().resource_metrics[0].scope_metrics
        say(",".join(sorted(each.name for scope in found for each in scope.metrics)))
        return True

meters = MeterProvider([Reader()], shutdown_on_exit=False)
provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(BatchSpanProcessor(Said()))
instrument(provider=provider, meter_provider=meters, sigterm_timeout=TIMEOUT, detail=DETAIL)
meters.get_meter("application").create_counter("requests").add(1)
with provider.get_tracer("application").start_as_current_span("request"):
    work("label")
terminate_me()
wait_for_ever()
"""
    said, status = ended(started('DETAIL = "ops"' + program, NEVER))
    assert status == KILLED
    assert {"request", "label"} <= set(said)
    assert "requests" in said[-1].split(",")
    said, status = ended(started('DETAIL = "metrics"' + program, NEVER))
    assert status == KILLED
    assert said[0] == "request"
    assert "requests" in said[-1].split(",")


def test_the_first_process_of_a_container_flushes_and_continues():
    """The kernel ignores SIGTERM's default action for PID 1: what there is is sent, each time, and the recording continues."""
    namespace = [shutil.which("unshare") or "", "--user", "--map-root-user", "--pid", "--fork"]
    if not namespace[0] or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a PID namespace cannot be made here")
    program = """
class Noted(Said):
    def export(self, spans):
        try:
            return super().export(spans)
        finally:
            if any(span.name == name for span in spans):
                exported.set()

exported = threading.Event()
instrument(Noted(), sigterm_timeout=TIMEOUT)
for name in ("first", "second"):
    exported.clear()
    work(name)
    while not exported.wait(0.05):
        terminate_me()
os._exit(0)
"""
    said, status = ended(started(program, 30.0, *namespace))
    assert (said, status) == (["first", "second"], 0)


def test_without_a_thread_the_action_stays(monkeypatch, caplog):
    """Where no thread can be started to flush, SIGTERM keeps its default action, and one warning says why."""

    def start(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads.Thread, "start", start)
    flush = SigtermFlush(NEVER, None, None, None)
    flush.start()
    assert lib.otp_sigterm_watch(1) == 1  # refused while it is watched
    flush.stop()
    (record,) = caplog.records
    assert record.getMessage() == "SIGTERM ends the process without a flush: can't start new thread"


@pytest.mark.parametrize("value", [-1, "soon", float("inf"), float("nan"), True])
def test_a_bad_timeout_is_refused(value):
    """The error names the keyword, the value and what is allowed."""
    with pytest.raises(ValueError, match=r"sigterm_timeout is .*; allowed is a number of seconds, 0 or above"):
        otp.TorchInstrumentor().instrument(sigterm_timeout=value, skip_dep_check=True)
