"""Times of devices where processes fork, end, are interrupted, and forget to stop."""

from __future__ import annotations

from simulated_device import run_on_device

PRELUDE = """
import gc, os, signal, sys, threading
import otel_torchprof as otp
a = torch.zeros(4, 4).to("privateuseone")
def profile(**options):
    return otp.profile(use_device="privateuseone", **options)
"""


def run(script, **options):
    """Runs a script on the device; its output, after it has ended well."""
    done = run_on_device(PRELUDE + script, **options)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done


def test_exit_while_it_records():
    """A process that ends while a profile runs, with work under way, ends as without."""
    done = run(
        """
prof = profile()
prof.start()
sim.manual()
for _ in range(10_000):
    torch.add(a, a)
print("end")
""",
        anew=True,
    )
    assert done.stdout == "end\n"
    assert "Traceback" not in done.stderr


def test_forked_child():
    """A child that is forked while times are recorded ends well, records nothing of its parent's, and its parent goes on."""
    done = run("""
with profile() as prof:
    for _ in range(100):
        torch.add(a, a)
    child = os.fork()
    if child == 0:
        for _ in range(100):
            torch.add(a, a)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    for _ in range(100):
        torch.add(a, a)
print(os.waitstatus_to_exitcode(status), len(prof._batch().devices["event"]), sim.counts()["alive"])
""")
    assert done.stdout == "0 200 0\n"


def test_child_records_anew():
    """A forked child whose device works there can record times of its own."""
    done = run("""
prof = profile()
prof.start()
torch.add(a, a)
child = os.fork()
if child == 0:
    with profile() as own:
        torch.add(a, a)
        torch.add(a, a)
    print(len(own._batch().devices["event"]), own.health.devices, flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
prof.stop()
print(os.waitstatus_to_exitcode(status), len(prof._batch().devices["event"]))
""")
    assert done.stdout == "2 on\n0 1\n"


def test_dropped_profile():
    """A profile that nobody stopped gives the device's events back when it is collected."""
    done = run("""
prof = profile()
prof.start()
for _ in range(100):
    torch.add(a, a)
del prof
gc.collect()
print(sim.counts()["alive"], [t.name for t in threading.enumerate()])
torch.add(a, a)
print(sim.counts()["records_timed"] > 0, sim.counts()["alive"])
""")
    assert done.stdout == "0 ['MainThread']\nTrue 0\n"


def test_signals_go_to_the_program():
    """A signal interrupts what the program waits in: the thread that reads times back takes none."""
    done = run("""
caught = []
signal.signal(signal.SIGALRM, lambda *_: caught.append(threading.current_thread() is threading.main_thread()))
with profile():
    torch.add(a, a)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    signal.pause()
print(caught)
""")
    assert done.stdout == "[True]\n"


def test_threads_that_end_before_the_device_comes():
    """What threads have left under way when they end is read back all the same, and once."""
    done = run("""
sim.duration(4_000)
def work():
    with sim.stream():
        for _ in range(50):
            torch.add(a, a)
with profile(all_threads=True) as prof:
    sim.manual()
    for _ in range(8):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    sim.complete_all()
table = prof._batch().devices
print(len(table["event"]), len(set(table["event"].tolist())), set(table["duration"].tolist()), sim.counts()["alive"])
""")
    assert done.stdout == "400 400 {4000} 0\n"


def test_many_starts_and_stops():
    """Two hundred profiles one after another, some inside others, leave no event and no thread of the process."""
    done = run("""
def threads():
    return len(os.listdir("/proc/self/task"))
with profile():
    torch.add(a, a)
before = threads()
for i in range(200):
    with profile() as outer, profile(device_events="all") as inner:
        torch.add(a, a)
    assert len(outer._batch().devices["event"]) == len(inner._batch().devices["event"]) == 1
print(sim.counts()["alive"], threads() - before)
""")
    assert done.stdout == "0 0\n"


def test_stop_from_another_thread_while_events_begin():
    """A profile may be stopped on another thread while operators run, again and again, and nothing is left over."""
    done = run("""
ended = threading.Event()
def work():
    while not ended.is_set():
        torch.add(a, a)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(100):
    with profile(all_threads=True) as prof:
        torch.add(a, a)
ended.set()
for thread in threads:
    thread.join()
print(sim.counts()["alive"], sim.violations())
""")
    assert done.stdout == "0 []\n"


def test_traced_gpu_work():
    """Where torch tells Python of all GPU work, under Python's lock, times end, health says why, and the rest is recorded."""
    done = run("""
torch._C._activate_gpu_trace()
with profile() as prof:
    torch.add(a, a)
print(prof.health.devices)
print([event.name for event in prof.events()], sim.counts()["alive"])
""")
    assert "torch's tracing of GPU work (torch.cuda._sanitizer) is on" in done.stdout
    assert done.stdout.endswith("['aten::add'] 0\n")


def test_threads_on_one_stream():
    """What several threads put on the same stream is read back when it is done, in whatever order it was gathered."""
    done = run("""
sim.automatic()
sim.duration(20_000)
def work():
    for _ in range(1000):
        torch.add(a, a)
with profile(all_threads=True) as prof:
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(prof.health.devices, len(set(prof._batch().devices["event"].tolist())), prof.health.notes)
""")
    assert done.stdout == "on 3000 ()\n"


def test_labels_use_no_device_first():
    """A label on a device that the process has not used leaves no mark there, so that it is not the first to use it."""
    done = run("""
sim.unused(1)
with profile(device_events="labels") as prof:
    for index in (1, 0):
        torch.privateuseone.set_device(index)
        with otp.record_function(str(index)):
            pass
names, table = prof._batch().names, prof._batch().devices
print(len(table["event"]), set(table["device_index"].tolist()))
""")
    assert done.stdout == "1 {0}\n"
