"""A thread that hangs: where it is stands in the black box, and whoever has an exporter for logs is told."""

import os
import subprocess
import sys
import textwrap
import time

import forked_programs
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, TraceFlags
from providers import instrumented, new_provider

import otel_torchprof as otp
from otel_torchprof._files import box as box_module
from otel_torchprof._files.box_file import SUFFIX
from otel_torchprof._files.rank_state import python_line
from otel_torchprof._native.blackbox import read_image

HANG = """\
import ctypes, sys, threading
from otel_torchprof._files.box import BlackBox
from otel_torchprof.parsers import black_box
from otel_torchprof import record_function

box = BlackBox(black_box(f"ops,{sys.argv[1]},2M,hang=0.3"))
box.start()

def load_batch():
    with record_function("load"):
        BLOCK

print(box.state, flush=True)
load_batch()
"""


def hanging(tmp_path, block, **environment):
    """What the box of a program has once somebody has written the stacks of its threads."""
    program = tmp_path / "loop.py"
    program.write_text(textwrap.dedent(HANG).replace("BLOCK", block))
    process = forked_programs.Popen(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "on\n"
        (path,) = tmp_path.glob(f"*{SUFFIX}")
        deadline = time.monotonic() + 60
        while not (contents := read_image(path.read_bytes())).hang_since_ns or not (contents.stacks or environment):
            assert time.monotonic() < deadline
        return process.pid, contents
    finally:
        process.kill()
        process.communicate()


def test_the_line_that_waits_stands_in_the_box(tmp_path):
    """Of a loop that waits for an event that never comes, the box has the file, the line and the function."""
    pid, contents = hanging(tmp_path, "threading.Event().wait()")
    assert contents.hang_os_tid == pid
    assert python_line(contents, pid) == "loop.py:11 load_batch"


def test_the_line_is_known_though_pythons_lock_is_held(tmp_path):
    """Of a thread that holds the interpreter's lock in C for ever, the stacks are written without that lock."""
    pid, contents = hanging(tmp_path, "ctypes.PyDLL(None).sleep(3600)")
    assert contents.stacks.startswith(f"Thread {pid} (most recent call first):\n")
    assert python_line(contents, pid) == "loop.py:11 load_batch"


def test_hidden_code_is_not_in_the_box(tmp_path):
    """Where spans are not to have files of code, a hang is noted and no stack is."""
    pid, contents = hanging(tmp_path, "threading.Event().wait()", OTEL_TORCHPROF_HIDDEN_ATTRIBUTES="code.file.path")
    assert contents.hang_os_tid == pid
    assert "load_batch" not in contents.stacks


@pytest.mark.parametrize("step", [None, SpanContext(5, 6, is_remote=False, trace_flags=TraceFlags(1))])
def test_a_log_record_says_it(monkeypatch, step):
    """A LoggerProvider gets one record with the event's name and the thread, in the span of the step that runs."""
    records = []

    class Logger:
        emit = staticmethod(records.append)

    monkeypatch.setattr("opentelemetry._logs.get_logger", lambda *_arguments: Logger())
    with trace.use_span(trace.NonRecordingSpan(SpanContext(7, 8, is_remote=False))):
        box_module._emit("thread 7 hangs", 7, step)
    assert [(record.event_name, record.body, dict(record.attributes)) for record in records] == [
        ("torch.hang", "thread 7 hangs", {"thread.id": 7})
    ]
    assert (records[0].trace_id, records[0].span_id) == ((0, 0) if step is None else (5, 6))


def test_the_step_that_runs_is_the_span_of_the_record():
    """What a hang's log record belongs to is the span of the running step, as it is sent once the step has ended."""
    pytest.importorskip("torch", reason="only torch is instrumented")
    exporter = InMemorySpanExporter()
    provider = new_provider(otp.TorchSpanProcessor(exporter))
    with instrumented(provider, detail="steps") as instrumentor:
        instrumentor.step()
        instrumentor.step()
        with otp.record_function("in the step"):
            pass
        provider.force_flush()
        running = instrumentor._running_step()
        instrumentor.step()
        provider.force_flush()
    sent = {span.context.span_id: span for span in exporter.get_finished_spans() if span.name == "torch.step"}
    assert running is not None
    assert sent[running.span_id].context.trace_id == running.trace_id
    assert sent[running.span_id].attributes["torch.step.number"] == 2
