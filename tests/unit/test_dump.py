"""The command ``dump``: Python calls and open events in one tree, from the process itself, else from its box."""

from __future__ import annotations

import os
import threading

import pytest
from checked_json import checked
from opentelemetry.sdk.trace import TracerProvider
from rank_boxes import NOW, SECOND, contents

import otel_torchprof as otp
from otel_torchprof._answers.dumped import dump_of_box, merged
from otel_torchprof._answers.running import OpenCall
from otel_torchprof._cli import main as cli
from otel_torchprof._cli.dump import as_text
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.samples import Call
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._instrument import control_dump
from otel_torchprof._instrument.control_verbs import socket as own_socket
from otel_torchprof._process import private_folder

MODULE = "/x/site-packages/torch/nn/modules/module.py"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder of sockets and boxes is the test's."""
    monkeypatch.setattr(private_folder, "_SHARED_MEMORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def instrumented(folder):
    """The process of the test, with a box."""
    instrumentor = otp.TorchInstrumentor()
    provider = TracerProvider(shutdown_on_exit=False)
    instrumentor.instrument(tracer_provider=provider, skip_dep_check=True, blackbox=f"ops,1M,{folder}/boxes")
    yield instrumentor
    instrumentor.uninstrument()


@pytest.fixture
def blocked():
    """A thread that is in a label in a function of a known name."""
    ready, done = threading.Event(), threading.Event()

    def wait_for_batch() -> None:
        with otp.record_function("load_batch"):
            ready.set()
            done.wait()

    thread = threading.Thread(target=wait_for_batch, name="loader")
    thread.start()
    ready.wait()
    yield thread
    done.set()
    thread.join()


def test_threads_of_a_living_process(instrumented, blocked, capsys):
    """Each thread has its Python calls, outer ones first, and what is open; threads of this package are left out."""
    assert cli.main(["dump", str(os.getpid()), "--json"]) == 0
    (process,) = checked("dump", capsys.readouterr().out)
    threads = {thread["name"]: thread for thread in process["threads"]}
    assert process["threads"][0]["name"] == "main"
    assert threads["main"]["os_tid"] == os.getpid()
    places = threads["loader"]["places"]
    assert threads["loader"]["os_tid"] == blocked.native_id
    names = [(place["kind"], place["name"]) for place in places]
    assert ("python", "wait_for_batch") in names
    assert names[-1] == ("label", "load_batch")
    assert names.index(("python", "wait_for_batch")) < names.index(("python", "wait"))
    assert places[-1]["since_ns"] <= process["time_ns"]
    assert not [name for name in threads if name.startswith("otel-torchprof")]


def test_all_processes_as_text(instrumented, blocked, capsys):
    """The text has a line per call, with the time for which an event has been open."""
    assert cli.main(["dump", "--all"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].startswith(f"process {os.getpid()} (")
    assert any(line.endswith(" s  label load_batch") for line in lines)
    assert any("test_dump.py:" in line and line.endswith(" wait_for_batch") for line in lines)


def test_without_a_box(folder, blocked, capsys):
    """The Python stacks are there, and what is missing is said."""
    instrumentor = otp.TorchInstrumentor()
    instrumentor.instrument(tracer_provider=TracerProvider(shutdown_on_exit=False), skip_dep_check=True)
    try:
        assert cli.main(["dump", str(os.getpid())]) == 0
    finally:
        instrumentor.uninstrument()
    text = capsys.readouterr().out
    assert "wait_for_batch" in text
    assert "are not known without a black box: OTEL_TORCHPROF_BLACKBOX=ops" in text


def test_a_process_that_does_not_answer(instrumented, blocked, monkeypatch, capsys):
    """What is open comes from its box, with the reason, and the status is 1; without a box there is only the error."""
    monkeypatch.setattr("otel_torchprof._cli.dump.SECONDS", 0.01)
    with own_socket._looking:  # as if its thread did not run
        assert cli.main(["dump", str(os.getpid())]) == 1
        captured = capsys.readouterr()
        monkeypatch.setattr("otel_torchprof._cli.dump.box_of", lambda _: None)
        assert cli.main(["dump", str(os.getpid())]) == 1
        assert capsys.readouterr().out == ""
    assert "note: from its black box, since " in captured.out
    assert captured.out.rstrip().endswith("label load_batch")
    assert "has not answered" in captured.err


def test_a_process_that_does_not_exist(folder, capsys):
    """It is named; and where none runs, that is said."""
    assert cli.main(["dump", str(2**22 + 1)]) == 1
    assert str(2**22 + 1) in capsys.readouterr().err
    assert cli.main(["dump", "--all"]) == 1
    assert "no instrumented process" in capsys.readouterr().err
    assert cli.main(["dump"]) == cli.main(["dump", "1", "--all"]) == 1
    assert "name process ids, or --all" in capsys.readouterr().err


def test_calls_and_events_in_one_order():
    """Phases and modules come before the call in torch that they are; other events before the next of them, or at the end."""
    stack = [
        Call("train.py", 1, "<module>"),
        Call(MODULE, 10, "_wrapped_call_impl"),
        Call(MODULE, 20, "_call_impl"),
        Call("net.py", 3, "forward"),
        Call(MODULE, 10, "_wrapped_call_impl"),
        Call(MODULE, 20, "_call_impl"),
        Call("layer.py", 4, "forward"),
    ]
    events = [
        OpenCall("my step", Kind.LABEL, 1),
        OpenCall("torch.phase.forward", Kind.PHASE, 2),
        OpenCall("Net", Kind.MODULE, 3),
        OpenCall("layer", Kind.MODULE, 4),
        OpenCall("aten::mm", Kind.OPERATOR, 5),
    ]
    assert [place.name for place in merged(stack, events)] == [
        "<module>",
        "my step",
        "torch.phase.forward",
        "Net",
        "_wrapped_call_impl",
        "_call_impl",
        "forward",
        "layer",
        "_wrapped_call_impl",
        "_call_impl",
        "forward",
        "aten::mm",
    ]
    assert [place.name for place in merged([], events)] == [event.name for event in events]
    assert [place.name for place in merged(stack[:1], events)] == ["<module>", *(event.name for event in events)]


def test_stacks_that_the_hang_watch_wrote():
    """They are in the order of the tree, by thread, and the text says how old they are."""
    stacks = (
        'Thread 1001 (most recent call first):\n  File "/a/train.py", line 5 in load\n  File "/a/train.py", line 9 in main\n'
        'Thread 7 (most recent call first):\n  File "/a/other.py", line 2 in run\n'
    )
    columns = {"name": [1], "start": [NOW - SECOND], "end": [NOW], "flags": [int(Flag.UNFINISHED)]}
    batch = Batch.of(columns, ["", "aten::mm"], [RecordedThread(1001, 1, 0, "python")])
    found = contents(1, stacks=stacks, hang_since_ns=NOW - 20 * SECOND, events=lambda _: iter([batch]))
    dump = dump_of_box(found, NOW + SECOND, ["why"])
    assert [(thread.os_tid, [place.name for place in thread.places]) for thread in dump.threads] == [
        (1001, ["main", "load", "aten::mm"]),
        (7, ["run"]),
    ]
    text = as_text(dump)
    assert "rank 1" in text
    assert "has done nothing for 21 s" in text
    assert "     2.000 s  operator aten::mm" in text
    assert "hang=60" in as_text(dump_of_box(found._replace(stacks=""), NOW, []))


def test_when_steps_were_read():
    """A step that ended long before a drain is long, or the loop does something else; one that ended since is not known."""
    status = {"step": 41, "step_end_ns": NOW - 10 * SECOND, "steps_read_ns": NOW - 3 * SECOND, "step_seconds": 0.25}
    said = "steps were read 3.0 s ago: the latest, 41, had ended 7.0 s before that; a step takes 0.25 s"
    assert control_dump._steps(status, NOW) == said
