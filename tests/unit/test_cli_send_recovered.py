"""``otel-torchprof send --recovered``: the traces of processes that have died, sent once."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import forked_programs
import grpc
import pytest
from fault_server import Abort, GrpcReceiver, free_port
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult

import otel_torchprof as otp
from otel_torchprof import OTLPFileExporter
from otel_torchprof._cli.main import main
from otel_torchprof._files.box import BlackBox
from otel_torchprof._files.box_file import is_of_the_living, sole_sender
from otel_torchprof.parsers import BlackBoxOptions


@pytest.fixture
def dead(tmp_path):
    """A folder with the boxes of two processes that have died, and that of one that lives."""
    folder = tmp_path / "boxes"
    for name in ("first", "second", "living"):
        box = BlackBox(BlackBoxOptions("ops", str(folder), 1 << 20), {"rank": 3})
        box.start()
        with otp.record_function(f"of the {name}"):
            pass
        if name == "living":
            yield folder
        else:
            shutil.copy(box.path, tmp_path / name)
        box.stop()
        if name != "living":
            (tmp_path / name).rename(folder / f"{name}.otpbox")


def send(receiver_url: str, *paths) -> int:
    return main(["send", "--recovered", "--endpoint", receiver_url, *map(str, paths)])


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(("first", "second")))


def test_each_is_sent_once(dead, capsys):
    """The spans of dead processes arrive, those of a living one do not, and a second call sends nothing."""
    with GrpcReceiver() as receiver:
        assert send(receiver.url, dead) == 0
        assert sorted(name for name in receiver.names if name.startswith("of")) == ["of the first", "of the second"]
        sent = len(receiver.arrived)
        assert send(receiver.url, dead) == 0
        assert len(receiver.arrived) == sent
    assert names(dead) == ["first.sent.otpbox", "second.sent.otpbox"]
    assert "0 spans sent" in capsys.readouterr().err.splitlines()[-1]


def test_an_unreachable_receiver_costs_nothing(dead, capsys):
    """Where the receiver cannot be reached, boxes keep their names, and only one is tried."""
    assert (
        main(["send", "--recovered", "--timeout", "0.2", "--endpoint", f"http://localhost:{free_port()}", str(dead)])
        == 1
    )
    assert names(dead) == ["first.otpbox", "second.otpbox"]
    assert capsys.readouterr().err.count("sends this box again") == 1


def test_a_refused_box_does_not_hold_up_the_next(dead):
    """A box that the receiver refuses is not sent again, which would be refused again, and the one after it is sent."""
    with GrpcReceiver(turns=[Abort(grpc.StatusCode.INVALID_ARGUMENT, "no")]) as receiver:
        assert send(receiver.url, dead) == 1
        assert "of the second" in receiver.names
    assert names(dead) == ["first.sent.otpbox", "second.sent.otpbox"]


def test_what_cannot_be_read_is_said_and_left(dead, capsys):
    """A file that is no box is named and keeps its name, and the others are sent."""
    (dead / "first.otpbox").write_bytes(b"no box")
    with GrpcReceiver() as receiver:
        assert send(receiver.url, dead) == 1
        assert "of the second" in receiver.names
    assert "first.otpbox" in names(dead)
    assert f"cannot read '{dead}/first.otpbox'" in capsys.readouterr().err


def test_a_missing_folder_is_no_error(tmp_path, capsys):
    """Before the first death there is no folder: nothing is sent, and the exit status is 0."""
    assert send("http://localhost:1", tmp_path / "none") == 0
    assert "0 spans sent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--recovered", "--from", "3"], "--from continues one file"),
        ([], "no FILE is given: name trace files, or use --recovered"),
    ],
)
def test_bad_options(arguments, text, capsys):
    """Options that exclude each other, and no file at all, are named."""
    assert main(["send", *arguments]) != 0
    assert text in capsys.readouterr().err


def test_the_service_name_of_the_environment_counts(dead, monkeypatch):
    """OTEL_SERVICE_NAME of the next start names the spans; without it they are of the program that died."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "trainer")
    with GrpcReceiver() as receiver:
        assert send(receiver.url, dead) == 0
        requests = [ExportTraceServiceRequest.FromString(each.body) for each in receiver.arrived]
    resources = [each.resource for request in requests for each in request.resource_spans]
    values = {each.key: each.value.string_value for resource in resources for each in resource.attributes}
    assert values["service.name"] == "trainer"


def test_a_trace_that_cannot_be_written_is_not_called_sent(dead, monkeypatch):
    """Where there is no room for the trace, the exit status is 1, and the box keeps its name."""
    monkeypatch.setattr(OTLPFileExporter, "export", lambda *_: SpanExportResult.FAILURE)
    with GrpcReceiver() as receiver:
        assert send(receiver.url, dead) == 1
    assert names(dead) == ["first.otpbox", "second.otpbox"]


def test_a_folder_that_cannot_be_written_to(dead, monkeypatch, capsys):
    """Boxes that could not be renamed are not sent, since every call would send them again."""
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with GrpcReceiver() as receiver:
        assert send(receiver.url, dead) == 1
        assert not receiver.arrived
    assert "cannot be written to" in capsys.readouterr().err


def test_one_sender_at_a_time(dead, capsys):
    """While another process sends the boxes of a folder, none is sent, and they do not look like those of living processes."""
    with sole_sender(dead) as is_alone, GrpcReceiver() as receiver:
        assert is_alone
        assert send(receiver.url, dead) == 0
        assert not receiver.arrived
        assert not is_of_the_living(dead / "first.otpbox")
    assert "another process is sending the boxes" in capsys.readouterr().err


def test_a_name_that_was_used_before(dead):
    """A box that has the name of an earlier one, as `run` gives them, takes nothing's place."""
    earlier = dead / "first.sent.otpbox"
    earlier.write_bytes(b"earlier")
    with GrpcReceiver() as receiver:
        assert send(receiver.url, dead / "first.otpbox") == 0
    assert earlier.read_bytes() == b"earlier"
    assert (dead / "first.2.sent.otpbox").exists()


def test_what_is_no_regular_file_is_left_alone(dead):
    """A pipe with the name of a box is not opened."""
    os.mkfifo(dead / "pipe.otpbox")
    with GrpcReceiver() as receiver:
        assert send(receiver.url, dead) == 0


FORKS = """
import ctypes, os, sys
from otel_torchprof._files.box import BlackBox
from otel_torchprof.parsers import black_box
import otel_torchprof as otp

box = BlackBox(black_box(f"ops,1M,{sys.argv[1]}"))
box.start()
with otp.record_function("before"):
    pass
libc = ctypes.CDLL(None)
child = libc.fork()
if child == 0:
    os.read(0, 1)  # as long as the test wants
    libc._exit(0)
print(box.path, flush=True)
os.read(0, 1)
os.kill(os.getpid(), 9)
"""


def test_a_child_that_native_code_forked_does_not_keep_its_parent_alive(tmp_path, capsys):
    """It has the lock of the box: while the parent lives, the box is not sent and that is said; once it has died, it is sent."""
    process = forked_programs.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        path = Path(process.stdout.readline().strip())
        assert is_of_the_living(path)
        assert main(["send", "--recovered", "--endpoint", "http://127.0.0.1:9", str(tmp_path)]) == 0
        assert f"{str(path)!r} is not sent: its process still runs" in capsys.readouterr().err
        process.kill()
        process.wait()
        try:
            with path.open("rb") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # by the child
            assert not is_of_the_living(path)
            assert main(["recover", "-o", "none", str(path)]) == 0
            assert "was last seen at" in capsys.readouterr().out
        finally:
            process.stdin.close()  # ends the child
