"""Programs whose allocations fail: what is reported, by whom it is noticed, and that nothing else changes."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import weakref

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from instrumented import Collecting  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._answers import out_of_memory  # noqa: E402

TOO_MUCH = 1 << 50
KEPT_BYTES = 8 << 20
ROW = re.compile(r" +([\d,]+) +([\d,]*)  (.+)")


class Failing(torch.nn.Module):
    """Keeps 8 MiB, has as many in a local variable, and then requests too much."""

    def __init__(self):
        super().__init__()
        self.kept, self.local, self.requested = [], None, TOO_MUCH

    def forward(self, x):
        self.kept.append(torch.ones(KEPT_BYTES // 4))
        local = torch.ones(KEPT_BYTES // 4)
        self.local = weakref.ref(local)
        return x + torch.empty(self.requested, dtype=torch.int8).sum()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.failing = Failing()

    def forward(self, x):
        return self.failing(x)


def attempt(net):
    """Returns the error, without its frames."""
    with pytest.raises(RuntimeError) as caught:
        net(torch.ones(3))
    error = caught.value.with_traceback(None)
    del caught
    return error


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder of reports; nothing was reported so far."""
    monkeypatch.setattr(out_of_memory, "made_folder", lambda _name: tmp_path)
    monkeypatch.setattr(out_of_memory, "_noticed", out_of_memory._Noticed())
    return tmp_path


def only_text(folder):
    (path,) = folder.glob("otel-torchprof-memory.*.txt")
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_text()


def rows_of(text):
    """Size by place of the table of the CPU."""
    table = text.partition("in use on cpu:\n")[2].partition("\n\n")[0]
    return {place: int(size.replace(",", "")) for size, _, place in ROW.findall(table)}


def test_what_a_program_catches_itself_is_reported_with_the_table(folder, capfd):
    """An error that leaves a module has, when the program catches it, a line and a table of all that is in use; the error is torch's."""
    net = Net()
    with otp.stream(Collecting(), detail="ops", profile_memory=True) as stream:
        assert stream.health.sources["memory"] == "on"
        error = attempt(net)
        text, rows = only_text(folder), rows_of(only_text(folder))
    assert f"you tried to allocate {TOO_MUCH} bytes" in str(error)
    assert str(error) in text
    # What the frames of the error have is in use still.
    assert rows["forward, Net.failing, aten::ones"] == 2 * KEPT_BYTES
    assert rows.pop("total") == sum(rows.values())
    assert re.search(r"test_out_of_memory.py:\d+ forward\n$", text)
    lines = [line for line in capfd.readouterr().err.splitlines() if "out of memory" in line]
    assert len(lines) == 1
    assert lines[0].startswith("otel-torchprof: out of memory: 1,048,576 GiB requested at ")
    assert "16 MiB of forward, Net.failing, aten::ones" in lines[0]


def test_memory_is_freed_as_without_a_report(folder, monkeypatch, capfd):
    """What the frames of a caught error held is freed at once, without a collection, so that a smaller batch fits; a loop reports once a minute."""
    now, net = [0.0], Net()
    monkeypatch.setattr(out_of_memory, "_clock", lambda: now[0])
    gc.disable()
    try:
        with otp.stream(Collecting(), detail="ops", profile_memory=True):
            for later, reports in ((0, 1), (30, 0), (31, 1)):
                now[0] += later
                attempt(net)
                assert net.failing.local() is None
                assert capfd.readouterr().err.count("out of memory") == reports
            net.failing.kept.clear()
            net.failing.requested = 8
            net(torch.ones(3))
            net.failing.requested, now[0] = TOO_MUCH, 1000.0
            attempt(net)
    finally:
        gc.enable()
    assert rows_of(only_text(folder))["forward, Net.failing, aten::ones"] == 3 * KEPT_BYTES


@pytest.mark.parametrize("name", ["byte_text", "resident_memory", "emit", "made_folder", "requested_bytes", "_Report"])
def test_no_memory_for_the_report(folder, monkeypatch, name):
    """If the report itself finds no memory, the program has its own error and nothing else."""

    def fails(*_arguments):
        raise MemoryError

    monkeypatch.setattr(out_of_memory, name, fails)
    net = Net()
    with otp.stream(Collecting(), detail="ops", profile_memory=True):
        assert "DefaultCPUAllocator" in str(attempt(net))
        assert net.failing.local() is None


def test_on_another_thread_and_with_steps_alone(folder):
    """An error on any thread is reported at each level of detail; without a table the report says what to switch on."""
    with otp.stream(Collecting(), detail="steps"):
        thread = threading.Thread(target=attempt, args=(Net(),))
        thread.start()
        thread.join()
        text = only_text(folder)
    assert "OTEL_TORCHPROF_DETAIL=ops,memory=true" in text
    assert re.search(r"test_out_of_memory.py:\d+ forward\n$", text)


@pytest.mark.parametrize(
    ("block", "reports"),
    [
        (lambda: torch.empty(TOO_MUCH), 1),
        (lambda: bytearray(1 << 60), 1),
        (lambda: torch.ones(2) + torch.ones(3), 0),
    ],
    ids=["torch", "Python", "another error"],
)
def test_a_label_that_fails(folder, block, reports):
    """Torch's errors and Python's own count, in a label, too; other errors do not."""
    with (
        otp.stream(Collecting(), detail="modules"),
        pytest.raises((RuntimeError, MemoryError)),
        otp.record_function("load"),
    ):
        block()
    assert len(list(folder.iterdir())) == reports


def keep_and_fail(kept):
    kept.extend(torch.ones(1000) for _ in range(10))
    torch.empty(TOO_MUCH)


def test_a_profile_has_lines(folder):
    """A profile that an error leaves reports what it has recorded, with the lines of the program if calls were recorded."""
    kept = []
    with (
        pytest.raises(RuntimeError, match="DefaultCPUAllocator"),
        otp.profile(profile_memory=True, with_modules=True, with_stack=True) as prof,
    ):
        keep_and_fail(kept)
    rows = rows_of(only_text(folder))
    pattern = r"aten::ones, .*test_out_of_memory.py\(\d+\)"
    assert [size for place, size in rows.items() if re.search(pattern, place)] == [40_000]
    assert prof.key_averages()


def test_a_profile_without_memory_keeps_the_table(folder, capfd):
    """An error that has been reported with what is in use is not reported again by a profile that has not recorded it."""
    net = Net()
    with (
        otp.stream(Collecting(), detail="ops", profile_memory=True),
        pytest.raises(RuntimeError, match="DefaultCPUAllocator"),
        otp.profile(),
    ):
        net(torch.ones(3))
    assert "forward, Net.failing, aten::ones" in rows_of(only_text(folder))
    assert capfd.readouterr().err.count("out of memory") == 1


def test_an_error_of_a_worker_is_reported_once(folder, capfd):
    """A profile has no more to say of an error in a worker of a DataLoader than what was reported on its way."""
    message = (
        "Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: DefaultCPUAllocator: can't allocate memory"
    )
    with (
        otp.stream(Collecting(), detail="ops"),
        pytest.raises(RuntimeError, match="worker"),
        otp.profile(profile_memory=True),
        otp.record_function("load"),
    ):
        raise RuntimeError(message)
    assert capfd.readouterr().err.count("out of memory") == 1
    assert "in use" not in only_text(folder)


PROGRAM = """
import os, sys, torch
import otel_torchprof as otp
torch.set_num_threads(1)
if "instrument" in sys.argv:
    from opentelemetry.sdk.trace import TracerProvider
    otp.TorchInstrumentor().instrument(tracer_provider=TracerProvider())
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
if "instrument" in sys.argv and (child := os.fork()):
    os.waitpid(child, 0)
torch.empty(1 << 50)
"""


@pytest.mark.parametrize("how", ["run", "instrument"])
def test_an_error_that_ends_the_program(tmp_path, how):
    """One that is in no phase is reported when it ends the program, and in a forked child; its traceback and its status are as they were."""
    program, boxes = tmp_path / "train.py", tmp_path / "boxes"
    program.write_text(PROGRAM)
    command = (
        [sys.executable, "-m", "otel_torchprof", "run", "-q", "-o", "none", "--detail", "steps", "--memory"]
        if how == "run"
        else [sys.executable]
    )
    environment = {**os.environ, "OTEL_TORCHPROF_BLACKBOX": f"steps,{boxes}", "OTEL_TRACES_EXPORTER": "none"}
    environment["OTEL_TORCHPROF_DETAIL"] = "ops,memory=true"
    done = subprocess.run(
        [*command, str(program), how], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    ended = 1 if how == "run" else 2
    assert (
        len(
            re.findall(
                r"otel-torchprof: out of memory: 4,194,304 GiB requested at .*train.py:\d+ <module>", done.stderr
            )
        )
        == ended
    )
    assert done.stderr.count("Traceback") == ended
    texts = sorted((path.read_text() for path in boxes.glob("otel-torchprof-memory.*.txt")), key=len)
    assert len(texts) == ended
    assert "aten::" in texts[-1]
