"""Times of devices where profiles start and stop in odd ways: at once, interrupted, forked, again and again, with nothing left."""

from __future__ import annotations

from simulated_device import run_on_device

PRELUDE = """
import gc, os, resource, signal, sys, threading, time
import otel_torchprof as otp
from otel_torchprof._record import device_source, source
from otel_torchprof._native import device_timing, torch_library
from otel_torchprof._native.recorder import Session
DEVICE = "privateuseone"
a = torch.zeros(4, 4).to(DEVICE)
def profile(**options):
    return otp.profile(use_device=DEVICE, **options)
def times(prof):
    return len(prof._batch().devices["event"])
def timed(library=torch_library.load()):
    session = Session(1 << 20, devices=True)
    session.start()
    return session, library.time_devices(session, DEVICE, "ops", 1000)
gc.collect()
gc.freeze()  # collections are quick from here on: they look at what a script makes, not at all of torch
"""


def run(script):
    """What a script prints on the device, after it has ended well."""
    done = run_on_device(PRELUDE + script)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def test_starts_and_stops_on_several_threads():
    """Threads that start and stop at the same time hang nowhere, and leave no event of the device and no thread."""
    assert (
        run("""
def cycle():
    for _ in range(300):
        session, timing = timed()
        timing.stop(0.0)
        session.stop()
before = len(os.listdir("/proc/self/task"))
threads = [threading.Thread(target=cycle) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
end = time.monotonic() + 20
while len(os.listdir("/proc/self/task")) > before and time.monotonic() < end:
    os.sched_yield()  # what join() waits for is Python's thread: the system's ends a moment later
print(sim.counts()["alive"], sim.violations(), len(os.listdir("/proc/self/task")) <= before)
""")
        == "0 [] True\n"
    )


def test_no_thread_is_left():
    """Where the system has no thread left nothing is timed, health says so, signals still come, and nothing stays behind."""
    assert (
        run("""
prof = profile()
end = threading.Event()
waiting = [threading.Thread(target=end.wait) for _ in range(8)]  # so that the stack of no ended thread is at hand
for thread in waiting:
    thread.start()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (5 << 20), resource.RLIM_INFINITY))
prof.start()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
end.set()
torch.add(a, a)
prof.stop()
print(prof.health.devices.partition(":")[0], signal.pthread_sigmask(signal.SIG_BLOCK, []), sim.counts()["alive"])
with profile() as again:
    torch.add(a, a)
print(times(again))
""")
        == "off set() 0\n1\n"
    )


def test_a_device_that_is_busy_at_the_start():
    """A start that the device does not answer leaves no event of it, however often it is tried; the times come later."""
    assert (
        run("""
sim.manual()
for _ in range(3):
    with profile() as prof:
        pass
print(prof.health.devices.partition(":")[0], sim.counts()["alive"])
""")
        == "on 0\n"
    )


def test_a_label_that_outlasts_its_calibration():
    """A label around work that lasts longer than the events of calibrations are kept has its time, from where it began."""
    assert (
        run("""
sim.automatic()
sim.duration(0)
with profile() as prof:
    with otp.record_function("epoch"):
        for _ in range(80):
            timed()[1].stop(0.0)
            gc.collect()
batch = prof._batch()
row = [batch.names[name] for name in batch["name"]].index("epoch")
at = batch.devices["event"].tolist().index(batch["id"][row])
late = batch.devices["start"][at] - batch["start"][row]
longer = batch.devices["duration"][at] - (batch["end"][row] - batch["start"][row])
print(abs(int(late)) < 20_000_000, abs(int(longer)) < 20_000_000, prof.health.notes)
""")
        == "True True ()\n"
    )


def test_what_is_left_open_is_no_later_profiles():
    """A label that is left open and ends in a later profile, which has the number of its own in the recorder, is not timed there."""
    assert (
        run("""
around = profile()
around.start()
label = otp.record_function("open")
session, timing = timed()
bit = session.consumer
label.__enter__()
timing.stop(0.0)
session.stop()
del session
for _ in range(15):
    session, timing = timed()
    if session.consumer == bit:
        break
    timing.stop(0.0)
    session.stop()
    del session
label.__exit__(None, None, None)
print(session.consumer == bit, len(timing.stop()["event"]), timing.counts().timed)
""")
        == "True 0 0\n"
    )


def test_a_forked_child_does_not_touch_its_parents():
    """What a forked child does with its parent's profile does nothing to a profile of its own."""
    assert (
        run("""
prof = profile(device_events_every=2)
prof.start()
torch.add(a, a)
child = os.fork()
if child == 0:
    with profile() as own:
        torch.add(a, a)
        prof.step()
        torch.add(a, a)
    print(times(own), flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
prof.stop()
print(os.waitstatus_to_exitcode(status), times(prof))
""")
        == "2\n0 1\n"
    )


def test_a_fork_while_hooks_are_put_in():
    """A child that is forked while another thread has the lock of the hooks of graphs records as ever."""
    assert (
        run("""
held, done = threading.Event(), threading.Event()
otp.profile  # imports the catalog of sources, as everything that puts hooks in
def hold():
    with device_source.graph_hooks._lock:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    with profile() as own:
        torch.add(a, a)
    print(times(own), flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
done.set()
thread.join()
print(os.waitstatus_to_exitcode(status))
""")
        == "1\n0\n"
    )


GRAPH = """
class Graph:
    def capture_begin(self):
        torch.add(a, a)
    def capture_end(self):
        torch.add(a, a)
    def replay(self):
        torch.add(a, a)
torch.cuda.CUDAGraph = Graph
methods = dict(vars(Graph))
"""


def test_a_signal_handler_stops_while_hooks_are_put_in():
    """A handler that stops one profile while another puts its hooks in neither hangs nor leaves hooks, nor puts them in twice."""
    assert (
        run(
            GRAPH
            + """
prof = profile()
prof.start()
signal.signal(signal.SIGALRM, lambda *_: prof.stop())
installed_torch = torch_library.installed_torch
def interrupted():
    if sys._getframe(1).f_code.co_name == "install" and sys._getframe(1).f_code.co_filename == device_source.__file__:
        signal.raise_signal(signal.SIGALRM)
    return installed_torch()
torch_library.installed_torch = interrupted
with profile() as other:
    torch.add(a, a)
    Graph().replay()
names = [other._batch().names[name] for name in other._batch()["name"]]
print(times(other), names.count("torch.cuda.CUDAGraph.replay"), dict(vars(Graph)) == methods)
"""
        )
        == "3 1 True\n"
    )


def test_a_child_ends_the_capture_of_its_parent():
    """A capture that goes on in a forked child, whose parent's hooks are gone there, keeps no later profile from timing."""
    assert (
        run(
            GRAPH
            + """
prof = profile()
prof.start()
graph = Graph()
end = graph.capture_end
graph.capture_begin()
child = os.fork()
if child == 0:
    end()
    with profile() as own:
        graph.capture_end()
        torch.add(a, a)
    print(times(own), flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
end()
prof.stop()
print(os.waitstatus_to_exitcode(status), dict(vars(Graph)) == methods)
"""
        )
        == "2\n0 True\n"
    )


INTERRUPTED = """
files = {module.__file__ for module in (device_timing, device_source, source, torch_library)}
class Stop:
    def __init__(self, at):
        self.at, self.lines = at, 0
    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self
def interrupted(call, at):
    sys.settrace(Stop(at))
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
"""


def test_interrupts_in_stop_lose_nothing():
    """Wherever a stop is interrupted, the times are there after the next one, and the device's events go with the profile."""
    assert (
        run(
            INTERRUPTED
            + """
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions
at, lost = 0, []
while True:
    at += 1
    recording = ProfileSegment(RecordingOptions(device=DEVICE))
    recording.start()
    torch.add(a, a)
    more = interrupted(recording.stop, at)
    recording.stop()
    devices = recording.batch().devices
    if devices is None or len(devices["event"]) != 1:
        lost.append(at)
    del recording
    gc.collect()
    if sim.counts()["alive"]:
        lost.append((at, sim.counts()["alive"]))
    if not more:
        break
print(at > 20, lost)
"""
        )
        == "True []\n"
    )


def test_interrupts_in_start_leave_nothing():
    """Wherever a start is interrupted, nothing of it is left once the profile is gone, and the next one records as ever."""
    assert (
        run(
            GRAPH
            + INTERRUPTED
            + """
at, left = 0, []
while True:
    at += 1
    prof = profile()
    more = interrupted(prof.start, at)
    del prof
    gc.collect()
    records = sim.counts()["records_timed"]
    torch.add(a, a)
    if sim.counts()["alive"] or sim.counts()["records_timed"] != records or dict(vars(Graph)) != methods:
        left.append((at, sim.counts()["alive"]))
    with profile() as again:
        torch.add(a, a)
    if times(again) != 1:
        left.append(at)
    if not more:
        break
print(at > 20, left)
"""
        )
        == "True []\n"
    )


def test_interrupts_in_captures_hold_nothing_for_ever():
    """Wherever the begin or the end of a capture is interrupted, events are timed after it as before."""
    assert (
        run(
            GRAPH
            + INTERRUPTED
            + """
wrong = []
with profile() as prof:
    for call in ("capture_begin", "capture_end"):
        at = 0
        while True:
            at += 1
            graph = Graph()
            if call == "capture_end":
                graph.capture_begin()
            more = interrupted(getattr(graph, call), at)
            if call == "capture_begin" or more:
                graph.capture_end()
            records = sim.counts()["records_timed"]
            torch.add(a, a)
            if sim.counts()["records_timed"] < records + 2:
                wrong.append((call, at))
            if not more:
                break
print(at > 3, wrong)
"""
        )
        == "True []\n"
    )
