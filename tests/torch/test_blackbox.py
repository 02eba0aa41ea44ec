"""The black box of training programs that die, and of those that do not, each in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path

import preloaded
import pytest
from checked_json import checked

from otel_torchprof._cli import main as cli
from otel_torchprof._cli.show import read as read_trace
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._files.box_reading import read_box
from otel_torchprof._files.rank_state import state_of

ROOT = Path(__file__).resolve().parents[2]
KILLED = -signal.SIGKILL
DEADLY = 6
"""The step in which it dies; those before it are whole."""

PREAMBLE = """
import os, signal, sys
import otel_torchprof as otp
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import torch

provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(otp.TorchSpanProcessor(InMemorySpanExporter(), schedule_delay_millis=3_600_000))
box, detail = sys.argv[1:3]
instrumentor = otp.TorchInstrumentor()
instrumentor.instrument(
    tracer_provider=provider,
    meter_provider=MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False),
    detail=detail, blackbox=box, gpu_metrics=False,
)
"""

TRAINING = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

print(instrumentor.health.sources["black box"], flush=True)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader([(torch.ones(4), 0)] * 40, 4)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    if step == int(sys.argv[3]):
        with otp.record_function("the last"):
            os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
"""

SERVICE = """
import threading

class Waits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.called = threading.Event()

    def forward(self, x):
        self.called.set()
        threading.Event().wait()

def serve(model):
    with torch.inference_mode():
        model(torch.ones(1))

for model in (torch.nn.Sequential(Waits()), Waits()):
    threading.Thread(target=serve, args=(model,), daemon=True).start()
    next(each for each in model.modules() if isinstance(each, Waits)).called.wait()
torch.ones(2).sum()
os.kill(os.getpid(), signal.SIGKILL)
"""

COLLECTIVES = """
import datetime
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=90))
one = torch.ones(3, 4)
dist.all_reduce(one)
dist.all_gather([torch.ones(2)], torch.ones(2))
dist.reduce_scatter(torch.ones(5), [torch.ones(5)])
dist.all_reduce_coalesced([one] * 30)
dist.barrier()
os.kill(os.getpid(), signal.SIGKILL)
"""

NO_OPTIONS = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
dist.all_reduce(torch.ones(4))
os.kill(os.getpid(), signal.SIGKILL)
"""

WORKERS = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(2).exp()

if __name__ == "__main__":
    folder = box.partition(",")[2]
    for _ in torch.utils.data.DataLoader(Data(), 2, num_workers=1, multiprocessing_context=sys.argv[3]):
        pass
    names = [name for name in os.listdir(folder) if not name.startswith(f"{os.getpid()}.")]
    print(instrumentor.health.sources["black box"], names)
    instrumentor.uninstrument()
    print(os.listdir(folder))
"""


def environment(**more: str) -> dict[str, str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**keep, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


run = functools.partial(preloaded.run, has_package=True)


def died(folder: Path, detail: str, box: str = "ops", **more: str) -> Path:
    """The box of a training that has killed itself."""
    program = PREAMBLE + TRAINING
    done = run(program, f"{box},4M,{folder}", detail, str(DEADLY), environment=environment(**more))
    assert (done.returncode, done.stdout) == (KILLED, "on\n"), done.stderr
    (path,) = folder.glob("*.otpbox")
    return path


def steps_in(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Number and phases of each step of a trace."""
    sums, problems = read_trace(str(path))
    assert problems == []
    return [(step.number, dict(step.phases)) for step in sorted(sums.steps, key=lambda step: step.number)]


def names_in(path: Path) -> set[str]:
    batch = read_box(str(path)).batch
    return {batch.names[name] for name in batch["name"]}


@pytest.fixture(scope="module")
def box(tmp_path_factory) -> Path:
    """The box of a training with spans of operators."""
    return died(tmp_path_factory.mktemp("ops"), "ops")


@pytest.mark.parametrize("detail", ["ops", "steps"])
def test_every_step_until_the_last_moment(tmp_path, capsys, detail):
    """Whatever was to be sent of it, the trace has each step with its phases, also the one in which the process was killed."""
    path = died(tmp_path, detail)
    output = tmp_path / "trace.otlp"
    assert cli.main(["recover", str(path), "-o", str(output)]) == 0
    assert "in the last for " in capsys.readouterr().out
    steps = steps_in(output)
    assert [number for number, _ in steps] == list(range(DEADLY + 1))
    assert all({"data", "forward", "backward", "optimizer"} <= set(phases) for _, phases in steps)
    assert cli.main(["show", "--steps", str(output)]) == 0
    of_trace = capsys.readouterr().out
    assert cli.main(["show", "--steps", str(path)]) == 0
    assert capsys.readouterr().out == of_trace
    head, *rows, _ = of_trace.splitlines()
    assert head.split()[:4] == ["Step", "Started", "Duration", "data"]
    assert [row.split()[0] for row in rows if not row.endswith("unfinished")] == [str(step) for step in range(DEADLY)]
    assert rows[-1].split()[0] == str(DEADLY)


def test_what_was_open_is_marked(box, tmp_path, capsys):
    """The label in which it was killed is unfinished, and so is the step that it is in; what had ended is not."""
    output = tmp_path / "trace.jsonl"
    assert cli.main(["recover", str(box), "-o", str(output)]) == 0
    capsys.readouterr()
    spans = [
        span
        for line in output.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    unfinished = {
        span["name"] for span in spans if any(each["key"] == "torch.unfinished" for each in span["attributes"])
    }
    assert unfinished == {"torch.step", "the last"}
    ids = {span["spanId"]: span for span in spans}
    (last,) = [span for span in spans if span["name"] == "the last"]
    assert ids[last["parentSpanId"]]["name"] == "torch.step"
    assert last["endTimeUnixNano"] == max(span["endTimeUnixNano"] for span in spans)
    assert {"aten::addmm", "Model", "torch.phase.backward"} <= {span["name"] for span in spans}


@pytest.mark.parametrize("name", ["trace.otlp", "trace.json", "trace.json.gz"])
def test_other_commands_read_what_was_recovered(box, tmp_path, capsys, name):
    """``explain`` finds the same steps in the box and in every form of its trace."""
    output = tmp_path / name
    assert cli.main(["recover", str(box), "-o", str(output)]) == 0
    capsys.readouterr()
    found = []
    for path in (box, output):
        assert cli.main(["explain", "--json", str(path)]) == 0
        found.append(checked("explain", capsys.readouterr().out))
    assert found[0]["steps"] == found[1]["steps"]
    assert cli.main(["show", str(output)]) == 0
    assert "aten::addmm" in capsys.readouterr().out


def test_steps_alone(tmp_path):
    """A box of steps has phases and nothing else."""
    batch = read_box(str(died(tmp_path, "steps", "steps"))).batch
    assert set(batch["kind"].tolist()) == {Kind.PHASE}


def test_a_service_that_hangs(tmp_path):
    """Of the threads that serve requests it is in the one that has been in its model for longest; the main thread waits for connections."""
    assert run(PREAMBLE + SERVICE, f"ops,4M,{tmp_path}", "ops", environment=environment()).returncode == KILLED
    (path,) = tmp_path.glob("*.otpbox")
    state = state_of(read_box(str(path)), is_alive=False, now_ns=0, number=-1)
    assert state.place == "torch.phase.inference > Sequential > 0"


def test_beside_metrics(tmp_path, capsys):
    """With ``detail="metrics"`` there are operators and labels; steps are not known, since nothing looks for phases."""
    path = died(tmp_path, "metrics")
    assert {"aten::addmm", "the last"} <= names_in(path)
    assert cli.main(["show", str(path)]) == 0
    assert "aten::addmm" in capsys.readouterr().out
    assert cli.main(["show", "--steps", str(path)]) == 1
    assert "has no steps" in capsys.readouterr().err


def test_hidden_labels_and_modules(tmp_path):
    """No byte of the file has a hidden label, torch's own included; calls of modules are no events of it where ``torch.module`` is hidden."""
    hidden = {"OTEL_TORCHPROF_BLACKBOX_LABELS": "shown*", "OTEL_TORCHPROF_HIDDEN_ATTRIBUTES": "torch.module"}
    path = died(tmp_path, "ops", **hidden)
    batch = read_box(str(path)).batch
    assert Kind.MODULE not in batch["kind"]
    assert {"aten::addmm", "(hidden label)"} <= names_in(path)
    (last,) = batch["name"][(batch["flags"] & Flag.UNFINISHED != 0) & (batch["kind"] == Kind.LABEL)]
    assert batch.names[last] == "(hidden label)"
    image = path.read_bytes()
    assert b"the last" not in image
    assert b"Optimizer.step#SGD" not in image


@pytest.mark.parametrize("hidden", ["", "torch.op.input_shapes"])
def test_collectives(tmp_path, hidden):
    """It has each one's timeout and the shapes of its inputs, the beginning of very many, unless shapes are hidden."""
    done = run(
        PREAMBLE + COLLECTIVES,
        f"steps,4M,{tmp_path}",
        "steps",
        environment=environment(OTEL_TORCHPROF_HIDDEN_ATTRIBUTES=hidden),
    )
    assert done.returncode == KILLED, done.stderr
    (path,) = tmp_path.glob("*.otpbox")
    calls = read_box(str(path)).collectives
    assert {call.timeout_ns for call in calls} == {90 * 10**9}
    shapes = ["[[3, 4]]", "[[2]]", "[[5]]", ("[" + "[3, 4], " * 30)[:111], ""]
    assert [call.shapes for call in calls] == ([""] * 5 if hidden else shapes)


def test_a_backend_without_options(tmp_path):
    """Where a backend was made with none, its collectives are there, with a timeout that is not known."""
    done = run(PREAMBLE + NO_OPTIONS, f"steps,4M,{tmp_path}", "steps", environment=environment())
    assert done.returncode == KILLED, done.stderr
    (path,) = tmp_path.glob("*.otpbox")
    assert [(call.shapes, call.timeout_ns) for call in read_box(str(path)).collectives] == [("[[4]]", 0)]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_leave_none(tmp_path, start):
    """However they are started, none of their files is left when the loader is done, and the program's goes with it."""
    program = tmp_path / "program.py"
    program.write_text(PREAMBLE + WORKERS)
    folder = tmp_path / "boxes"
    done = run(program, f"ops,{folder}", "ops", start, environment=environment(), folder=tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["on []", "[]"]), done.stderr
    assert "Traceback" not in done.stderr


def test_a_forked_child_records_as_without_a_box(tmp_path):
    """Its operators are in its own spans and not in its parent's box, which ends with the parent."""
    program = """
x = torch.ones(2)
x.neg()
pid = os.fork()
(x.exp if pid == 0 else x.sin)()
if pid == 0:
    exporter = provider._active_span_processor._span_processors[0]
    provider.force_flush()
    print(sorted(row.key for row in exporter.key_averages() if row.key.startswith("aten::")), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run(PREAMBLE + program, f"ops,4M,{tmp_path}", "ops", environment=environment())
    assert (done.returncode, done.stdout) == (KILLED, "['aten::exp']\n"), done.stderr
    (path,) = tmp_path.iterdir()
    found = names_in(path)
    assert {"aten::neg", "aten::sin"} <= found
    assert "aten::exp" not in found
