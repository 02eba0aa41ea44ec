"""A thread that hangs: where it is stands in the black box, stderr has one line, and whoever has an exporter for logs gets it too."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import forked_programs
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, TraceFlags
from providers import instrumented, new_provider

import otel_torchprof as otp
from otel_torchprof._files import box as box_module
from otel_torchprof._files.box import EXIT_STATUS
from otel_torchprof._files.box_file import SUFFIX
from otel_torchprof._files.rank_state import python_line
from otel_torchprof._native.blackbox import read_image

HANG = """\
import ctypes, os, sys, threading
from otel_torchprof._files.box import BlackBox
from otel_torchprof.parsers import black_box
from otel_torchprof import record_function

sys.executable = os.environ.get("THE_REPORTS_PYTHON", sys.executable)
box = BlackBox(black_box(f"ops,{sys.argv[1]},2M,hang={sys.argv[2]}"))
box.start()

def load_batch():
    with record_function("load"):
        BLOCK

print(box.state, flush=True)
load_batch()
"""


def started(tmp_path, block, hang="0.3", **environment):
    """A program that hangs in this statement, once its box is open."""
    program = tmp_path / "loop.py"
    program.write_text(textwrap.dedent(HANG).replace("BLOCK", block))
    process = forked_programs.Popen(
        [sys.executable, str(program), str(tmp_path), hang],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "on\n"
    return process


def hanging(tmp_path, block, **environment):
    """What the box of a program has once somebody has written the stacks of its threads."""
    process = started(tmp_path, block, **environment)
    try:
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
    assert python_line(contents, pid) == "loop.py:12 load_batch"


def test_the_line_is_known_though_pythons_lock_is_held(tmp_path):
    """Of a thread that holds the interpreter's lock in C for ever, the stacks are written without that lock."""
    pid, contents = hanging(tmp_path, "ctypes.PyDLL(None).sleep(3600)")
    assert contents.stacks.startswith(f"Thread {pid} (most recent call first):\n")
    assert python_line(contents, pid) == "loop.py:12 load_batch"


def test_hidden_code_is_not_in_the_box(tmp_path):
    """Where spans are not to have files of code, a hang is noted and no stack is."""
    pid, contents = hanging(tmp_path, "threading.Event().wait()", OTEL_TORCHPROF_HIDDEN_ATTRIBUTES="code.file.path")
    assert contents.hang_os_tid == pid
    assert "load_batch" not in contents.stacks


def test_one_line_says_where_it_hangs(tmp_path):
    """Though Python's lock is held, stderr has one line with the place, and the file that it names begins with it and has the report."""
    process = started(tmp_path, "ctypes.PyDLL(None).sleep(3600)")
    try:
        line = process.stderr.readline()
        found = re.fullmatch(
            r"otel-torchprof: (hang: process (\d+) is in loop.py:12 load_batch, in load for \d+\.\d s; see (\S+))\n",
            line,
        )
        assert found is not None, line
        assert int(found[2]) == process.pid
        (report,) = tmp_path.glob("otel-torchprof-hang.*.txt")
        assert found[3] == str(report)
        first, rest = report.read_text().split("\n", 1)
        assert first == found[1]
        assert f"process {process.pid}: in loop.py:12 load_batch" in rest
    finally:
        process.kill()
        assert process.communicate()[1] == ""


@pytest.mark.parametrize("block", ["ctypes.PyDLL(None).sleep(3600)", "threading.Event().wait()"])
def test_a_process_that_is_to_end_gives_the_line_as_its_reason(tmp_path, block):
    """With exit it ends with its status after the line, whoever holds Python's lock; torchrun's file has the line if Python can run."""
    reason = tmp_path / "error.json"
    process = started(tmp_path, block, "0.3,exit", TORCHELASTIC_ERROR_FILE=str(reason))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_STATUS
    assert re.fullmatch(
        r"otel-torchprof: hang: .* in load for \d+\.\d s; see \S+; this process ends with status 75\n", errors
    ), errors
    if "PyDLL" not in block:
        assert json.loads(reason.read_text())["message"] in errors


def test_without_a_report_the_process_ends_all_the_same(tmp_path):
    """Where the report cannot be made, the line names the thread, and the process ends."""
    process = started(tmp_path, "threading.Event().wait()", "0.3,exit", THE_REPORTS_PYTHON="/no/python")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_STATUS
    assert errors.startswith(
        f"otel-torchprof: hang: thread {process.pid} of process {process.pid} has begun and ended nothing"
    )


def test_time_in_which_a_process_is_stopped_does_not_count(tmp_path):
    """One that is stopped for longer than its limit, as by a debugger or a machine that sleeps, and then runs on has not hung."""
    process = started(tmp_path, "sys.stdin.readline()", "2,exit")
    process.send_signal(signal.SIGSTOP)
    continues, clock = time.monotonic() + 3, threading.Event()
    while time.monotonic() < continues:
        clock.wait(0.1)
    process.send_signal(signal.SIGCONT)
    assert process.communicate("\n", timeout=60)[1] == ""
    assert process.returncode == 0


@pytest.mark.parametrize("step", [None, SpanContext(5, 6, is_remote=False, trace_flags=TraceFlags(1))])
def test_a_log_record_says_it(monkeypatch, step):
    """A LoggerProvider gets one record with the event's name and the thread, in the span of the step that runs."""
    records = []

    class Logger:
        emit = staticmethod(records.append)

    monkeypatch.setattr("opentelemetry._logs.get_logger", lambda *_arguments: Logger())
    with trace.use_span(trace.NonRecordingSpan(SpanContext(7, 8, is_remote=False))):
        box_module.emit(box_module._EVENT_NAME, "thread 7 hangs", step, 7)
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
