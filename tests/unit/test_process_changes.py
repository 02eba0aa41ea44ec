"""Names that are imported when they are asked for: nobody sees it in a child, at exit, or in the package's own namespace."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import otel_torchprof as otp

LONG = 60.0


def printed(program: str, *arguments: str) -> list[str]:
    """What a program of its own prints, which ends well and says nothing else."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore:.*multi-threaded:DeprecationWarning",
        *arguments,
        "-c",
        program,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * LONG)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


NAMES_REGISTER_NOTHING = """
import atexit, os
registered = []
atexit.register = lambda function, *_, **__: registered.append(function)
os.register_at_fork = lambda **functions: registered.extend(functions.values())
def own():
    return sorted(f.__name__ for f in registered if "otel_torchprof" in str(getattr(f, "__module__", "")))
import otel_torchprof as otp
print(own())
registered.clear()
for name in dir(otp):
    getattr(otp, name)
from otel_torchprof import dynamo, legacy, profiler, profiler_util
print(own())
"""


def test_asking_for_names_registers_nothing():
    """What is called at forks and exits is registered by the import, before a program's own, and by nothing that comes later."""
    by_import = ["_after_fork_in_child", "_after_fork_in_parent", "_before_fork", "_exit"]
    assert printed(NAMES_REGISTER_NOTHING) == [str(by_import), "[]"]


ORDER = """
import os
from otel_torchprof._process.process_changes import Order, at_exit, at_fork
def says(text, fails=False):
    def say():
        os.write(1, f"{text}\\n".encode())  # in one piece: parent and child speak at once
        if fails:
            raise OSError(text)
    return say
for order in reversed(Order):  # as if the modules had been imported the other way round
    at_fork(
        order, before=says(f"before {order.name}"), in_parent=says(f"parent {order.name}"), in_child=says(f"child {order.name}", order == 1)
    )
    at_exit(order, says(f"exit {order.name}"))
if os.fork() == 0:
    os._exit(0)
os.wait()
"""


def test_the_order_of_imports_is_of_no_consequence():
    """At forks and at exit functions are called in the order of their places, however they were registered; one that raises stops none."""
    names = ["STATE", "SOURCES", "EXPORT", "RECORDINGS", "LAST"]
    done = subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True, check=True, timeout=LONG)
    said = done.stdout.splitlines()
    assert "OSError: child SOURCES" in done.stderr
    assert [line for line in said if line.startswith("before")] == [f"before {name}" for name in reversed(names)]
    for when in ("parent", "child", "exit"):
        assert [line for line in said if line.startswith(when)] == [f"{when} {name}" for name in names]


IN_CHILD = """
import os, threading
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import otel_torchprof as otp

def in_child(body):
    pid = os.fork()
    if pid == 0:
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        thread.join(60)
        os._exit(thread.is_alive())
    print(os.waitpid(pid, 0)[1])
"""

PROCESSOR_ALONE = f"""{IN_CHILD}
exporter = InMemorySpanExporter()
processor = otp.TorchSpanProcessor(exporter, sdk_spans=True, schedule_delay_millis=3_600_000)
provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(processor)
def span(name):
    provider.get_tracer("test").start_span(name).end()
    processor.force_flush()
    print([span.name for span in exporter.get_finished_spans()], flush=True)
span("parent")
exporter.clear()
in_child(lambda: span("child"))
import sys
print("otel_torchprof._instrument.instrumentor" in sys.modules)
"""


def test_a_processor_without_an_instrumentor_begins_anew_in_a_child():
    """A forked child exports its spans where only the processor was ever asked for."""
    assert printed(PROCESSOR_ALONE) == ["['parent']", "['child']", "0", "False"]


INSTRUMENTS_IN_CHILD = f"""{IN_CHILD}
instrument = otp.TorchInstrumentor
in_child(lambda: instrument().instrument(tracer_provider=TracerProvider(), detail="steps", skip_dep_check=True))
"""


def test_a_thread_of_a_child_instruments_first():
    """Where the parent has instrumented nothing, the lock that its fork took is none of the child's threads'."""
    assert printed(INSTRUMENTS_IN_CHILD) == ["0"]


WHILE_IMPORTED = f"""{IN_CHILD}
import sys
entered, may_go_on = threading.Event(), threading.Event()
def gate(event, arguments):  # asked outside of the finders, around which Python has a lock that forks wait for
    if event == "import" and arguments[0] == "otel_torchprof._profile.options" and not entered.is_set():
        entered.set()
        may_go_on.wait(60)
sys.addaudithook(gate)
thread = threading.Thread(target=lambda: otp.profile)
thread.start()
entered.wait(60)
os.register_at_fork(before=may_go_on.set)  # registered last, so it is called first
in_child(lambda: otp.profile)
thread.join()
"""


def test_a_fork_waits_for_a_name_that_a_thread_asks_for():
    """A child can have a name that another thread of its parent was just asking for, the first to do so."""
    assert printed(WHILE_IMPORTED) == ["0"]


def test_the_names_are_those_that_type_checkers_see():
    """The table of what comes later and the imports for type checkers are the same, and ``dir`` lists all of it."""
    source = ast.parse(Path(otp.__file__).read_text())
    checked = next(node for node in source.body if isinstance(node, ast.If))
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom) and node.level]
    assert {alias.name: node.module for node in imports for alias in node.names} == otp._MODULES
    assert {*otp.__all__, *otp._MODULES} <= {*dir(otp)}


@pytest.mark.parametrize("name", sorted(otp._MODULES))
def test_a_name_is_one_thing(name):
    """It is what its module has, each time and in every way of asking, can be pickled by its name and has its help."""
    found = getattr(otp, name)
    assert found is getattr(otp, name) is vars(otp)[name]
    assert found is getattr(importlib.import_module(f"otel_torchprof.{otp._MODULES[name]}"), name)
    assert dict(inspect.getmembers(otp))[name] is found
    assert pickle.loads(pickle.dumps(found)) is found  # noqa: S301 - our own


def test_dynamo_reads_labels_without_asking():
    """What compiled functions use is there at once: torch reads the namespace itself."""
    assert printed(
        "import otel_torchprof as otp; print({'record_function', 'emit_nvtx', 'emit_itt'} <= {*vars(otp)})"
    ) == ["True"]
