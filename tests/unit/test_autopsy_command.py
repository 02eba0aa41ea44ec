"""The autopsy of real boxes: where a rank is, and the command."""

from __future__ import annotations

import os
import shutil
import threading
import time

import pytest
from checked_json import checked
from rank_boxes import SECOND, call

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._files.box import BlackBox
from otel_torchprof._files.rank_state import state_of
from otel_torchprof._native.blackbox import Collective, read_image, set_info
from otel_torchprof.parsers import BlackBoxOptions


@pytest.fixture
def box(tmp_path):
    """An open one in a folder of the test's, whose events are labels."""
    made = BlackBox(BlackBoxOptions("ops", str(tmp_path / "boxes"), 1 << 20), {"rank": 3, "world_size": 4})
    made.start()
    yield made
    made.stop()


@pytest.fixture
def in_a_thread():
    """Runs something in another thread, which has a label open in it until the test is over."""
    done, threads = threading.Event(), []

    def run(name: str) -> int:
        ready = threading.Event()

        def work() -> None:
            with otp.record_function(name):
                ready.set()
                done.wait()

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        ready.wait()
        return threads[-1].native_id

    yield run
    done.set()
    for thread in threads:
        thread.join()


def label(name: str) -> None:
    with otp.record_function(name):
        pass


def place_in(box, *calls: Collective, **more) -> tuple[str, str]:
    found = read_image(box.path.read_bytes())._replace(collectives=calls, **more)
    found = state_of(found, is_alive=True, now_ns=time.time_ns(), number=-1)
    return found.place, found.last_ended


def test_the_thread_that_stands_for_the_rank(box, in_a_thread):
    """It is the main thread where that is in something, or else the one of the last collective; never one that does other things meanwhile."""
    label("step")
    other = in_a_thread("prefetch")
    assert place_in(box) == ("", "step")
    assert place_in(box, call(1, os_tid=other)) == ("prefetch", "")
    with otp.record_function("forward"), otp.record_function("layer"):
        label("linear")
        assert place_in(box) == ("forward > layer", "linear")
        assert place_in(box, call(1, os_tid=other)) == ("forward > layer", "linear")


def test_a_program_that_trains_in_a_thread(box, in_a_thread):
    """Where the main thread has recorded nothing it is another one, that which is in something."""
    in_a_thread("forward")
    assert place_in(box) == ("forward", "")


def test_the_line_in_python(box, in_a_thread):
    """It is that of the thread's stack, unless the thread has done anything since the stack was written."""
    label("step")
    found = read_image(box.path.read_bytes())
    stack = f'Thread {os.getpid()} (most recent call first):\n  File "/job/train.py", line 41 in load_batch'
    hang = {"hang_since_ns": found.last_ns + 1, "hang_os_tid": os.getpid(), "stacks": stack}
    assert place_in(box, **hang) == ("train.py:41 load_batch", "step")
    with otp.record_function("forward"):
        assert place_in(box, **{**hang, "hang_since_ns": time.time_ns()}) == (
            "train.py:41 load_batch, in forward",
            "step",
        )
        assert place_in(box, **{**hang, "hang_since_ns": found.last_ns - SECOND}) == ("forward", "step")


def test_how_long_a_rank_is_where_it_is(box):
    """The time counts from the beginning of what is open, up to now."""
    with otp.record_function("forward"):
        contents_now = read_image(box.path.read_bytes())
        found = state_of(contents_now, is_alive=True, now_ns=contents_now.last_ns + 5 * SECOND, number=-1)
    begun = contents_now.batch["start"].max()
    assert abs(found.since_ns - int(begun)) <= 1000


def test_the_command(box, tmp_path, capsys):
    """It reads folders and files, each box once, and tells the process that lives from copies of its box."""
    with otp.record_function("load_batch"):
        shutil.copy(box.path, tmp_path / "copy.otpbox")
        assert cli.main(["autopsy", str(box.path.parent), str(box.path)]) == 0
        assert capsys.readouterr().out == (
            "there is no box of ranks 0-2\nno rank is known to wait for another\n\nrank 3: in load_batch\n"
        )
        set_info({})
        assert cli.main(["autopsy", str(box.path.parent), str(box.path)]) == 0
        assert capsys.readouterr().out.endswith(f"\nprocess {os.getpid()}: in load_batch\n")
        assert cli.main(["autopsy", str(tmp_path / "copy.otpbox")]) == 0
        assert "rank 3 does not run any more; last seen at " in capsys.readouterr().out
        assert cli.main(["autopsy", "--json", str(tmp_path)]) == 0
        assert [each["alive"] for each in checked("autopsy", capsys.readouterr().out)["ranks"]] == [True]


def test_boxes_that_cannot_be_read(box, tmp_path, capsys):
    """They are said, with status 1, and the others are read all the same; where there is none that is an error."""
    (tmp_path / "boxes" / "damaged.otpbox").write_bytes(b"\x00" * 5000)
    assert cli.main(["autopsy", str(tmp_path / "boxes"), str(tmp_path / "none.otpbox")]) == 1
    said = capsys.readouterr()
    assert "rank 3: in no recorded event" in said.out
    assert len(said.err.splitlines()) == 2
    (tmp_path / "empty").mkdir()
    assert cli.main(["autopsy", str(tmp_path / "empty")]) == 1
    assert capsys.readouterr().err == f"otel-torchprof: there is no .otpbox in {tmp_path / 'empty'}\n"


def test_the_command_names_boxes_of_other_runs(box, tmp_path, capsys):
    """What is left in the folder by an earlier run is not compared, and its file is named."""
    set_info({"rank": 0, "world_size": 2, "run_id": "old"})
    shutil.copy(box.path, box.path.parent / "old.otpbox")
    set_info({"rank": 3, "world_size": 4})
    assert cli.main(["autopsy", str(box.path.parent)]) == 0
    said = capsys.readouterr()
    assert "there is no box of ranks 0-2" in said.out
    assert said.err == (
        f"otel-torchprof: boxes of other runs, or of no rank, were left out: {box.path.parent / 'old.otpbox'}\n"
    )
