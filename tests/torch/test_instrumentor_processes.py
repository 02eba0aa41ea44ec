"""The instrumentation in programs of several processes, and in those that change no code. Each runs in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import preloaded
import pytest
from jsonl_exporter import read

HERE = Path(__file__).resolve().parent

PREAMBLE = """
import os, sys
import otel_torchprof as otp
from jsonl_exporter import JsonLinesExporter
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
import torch

provider = TracerProvider()
trace.set_tracer_provider(provider)
provider.add_span_processor(otp.TorchSpanProcessor(JsonLinesExporter(sys.argv[1])))
tracer = trace.get_tracer("program")

def instrument(detail="modules"):
    otp.TorchInstrumentor().instrument(detail=detail)

def infer(name):
    kind = type(name, (torch.nn.Linear,), {})
    with torch.no_grad():
        kind(2, 2)(torch.ones(1, 2))
"""


def run(tmp_path: Path, program: str, *, preamble: str = PREAMBLE, command: tuple[str, ...] = (), **environment: str):
    """Runs a program to its end; the spans of each of its processes. Without a command, it is forked from a process with torch and this package."""
    path = tmp_path / "program.py"
    path.write_text(preamble + textwrap.dedent(program))
    folder = tmp_path / "spans"
    folder.mkdir()
    keep = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    variables = {**keep, "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent.parent, HERE, tmp_path))), **environment}
    if not command:
        done = preloaded.run(path, str(folder), environment=variables, folder=tmp_path, has_package=True)
    else:
        done = subprocess.run(
            [*command, str(path), str(folder)],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return read(folder)


def names(spans):
    return [span["name"] for span in spans]


def by_first_name(processes):
    """Names of each process's spans, without phases, in the order of the names."""
    return sorted(
        [name for name in names(spans) if not name.startswith("torch.phase.")] for spans in processes.values()
    )


def test_a_forked_childs_operators_have_roots_of_its_own(tmp_path):
    """Operators before and after a fork, within one second and outside of any span: each process's are below its own roots."""
    processes = run(
        tmp_path,
        """
        instrument("ops")
        x = torch.ones(2)
        x.neg()
        pid = os.fork()
        x.exp()
        if pid == 0:
            provider.shutdown()
            os._exit(0)
        os.waitpid(pid, 0)
        """,
    )
    found = []
    for spans in processes.values():
        roots = {span["span"] for span in spans if span["name"] == "torch.operators"}
        outer = [span for span in spans if span["name"] in {"aten::neg", "aten::exp"}]
        assert {span["parent"] for span in outer} <= roots
        found.append(sorted(names(outer)))
    assert sorted(found) == [["aten::exp"], ["aten::exp", "aten::neg"]]


@pytest.mark.parametrize("detail", ["steps", "modules", "ops"])
def test_a_forked_child_goes_on_by_itself(tmp_path, detail):
    """After os.fork both record, each its own and nothing twice; what the parent had recorded, the parent sends."""
    processes = run(
        tmp_path,
        f"""
        instrument({detail!r})
        infer("Before")
        pid = os.fork()
        if pid == 0:
            infer("Child")
            provider.shutdown()
            os._exit(0)
        os.waitpid(pid, 0)
        infer("Parent")
        """,
    )
    inferences = sorted(names(spans).count("torch.phase.inference") for spans in processes.values())
    assert inferences == [1, 2]
    if detail != "steps":
        modules = {"Before", "Child", "Parent"}
        found = sorted([name for name in names(spans) if name in modules] for spans in processes.values())
        assert found == [["Before", "Parent"], ["Child"]]
    if detail == "ops":
        assert all("aten::linear" in names(spans) for spans in processes.values())


@pytest.mark.parametrize("detail", ["steps", pytest.param("ops", marks=pytest.mark.exhaustive)])
def test_a_forked_child_counts_its_own_steps(tmp_path, detail):
    """A child's steps begin at 0 and link to none of its parent's; where it says itself where they end, nothing else does."""
    processes = run(
        tmp_path,
        f"""
        instrument({detail!r})
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def train(steps):
            for _ in range(steps):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

        train(3)
        pid = os.fork()
        if pid == 0:
            train(1)
            otp.TorchInstrumentor().step()
            train(1)
            otp.TorchInstrumentor().step()
            provider.shutdown()
            os._exit(0)
        os.waitpid(pid, 0)
        """,
    )
    assert len(processes) == 2
    counts = []
    for spans in processes.values():
        steps = [span for span in spans if span["name"] == "torch.step"]
        finished = [span for span in steps if "torch.unfinished" not in span["attributes"]]
        finished.sort(key=lambda span: span["attributes"]["torch.step.number"])  # a drain may send a step's span late
        counts.append(len(finished))
        assert [span["attributes"]["torch.step.number"] for span in finished] == list(range(len(finished)))
        ids = {span["span"] for span in spans}
        assert all(link[1] in ids for span in finished for link in span["links"])
    assert sorted(counts) == [2, 3]


def test_a_forked_child_sees_root_modules_as_its_parent_does(tmp_path):
    """A model that is first called after many steps is a phase, in a child that was forked from there too."""
    processes = run(
        tmp_path,
        """
        instrument("steps")
        for _ in range(2):
            otp.TorchInstrumentor().step()
            provider.force_flush()
        infer("Unseen")
        pid = os.fork()
        if pid == 0:
            infer("Child")
            provider.shutdown()
            os._exit(0)
        os.waitpid(pid, 0)
        """,
    )
    found = [names(spans).count("torch.phase.inference") for spans in processes.values()]
    assert found == [1, 1]


def test_a_fork_in_the_middle_of_a_drain(tmp_path):
    """A child that is forked while the parent's drain waits for its sampler, with all locks taken, records, sums up and sends."""
    processes = run(
        tmp_path,
        """
        import threading
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        asked, let_go = threading.Event(), threading.Event()

        def wait(*arguments, **keywords):
            asked.set()
            assert let_go.wait(60)
            return ALWAYS_ON.should_sample(*arguments, **keywords)

        instrument()
        infer("Before")
        provider.sampler = type("Waits", (), {"should_sample": staticmethod(wait), "get_description": str})()
        processor = provider._active_span_processor._span_processors[0]
        flush = threading.Thread(target=provider.force_flush)
        flush.start()
        assert asked.wait(60)
        with processor.averages._lock:
            pid = os.fork()
            if pid == 0:
                let_go.set()
                infer("Child")
                assert [average.key for average in processor.key_averages()] == ["torch.phase.inference", "Child"]
                provider.shutdown()
                os._exit(0)
            os.waitpid(pid, 0)
        let_go.set()
        flush.join()
        infer("Parent")
        """,
    )
    assert by_first_name(processes) == [["Before", "Parent"], ["Child"]]


def test_prefork_servers(tmp_path):
    """A master that instruments and then forks workers (as gunicorn with preload does): each worker sends at its exit."""
    processes = run(
        tmp_path,
        """
        instrument()
        workers = []
        for number in range(3):
            pid = os.fork()
            if pid == 0:
                with tracer.start_as_current_span("request"):
                    infer(f"Worker{number}")
                sys.exit(0)
            workers.append(pid)
        for pid in workers:
            os.waitpid(pid, 0)
        """,
    )
    assert by_first_name(processes) == [["Worker0"], ["Worker1"], ["Worker2"]]
    assert all(span["parent"] != 0 for spans in processes.values() for span in spans)


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)], ids=["fork", "spawn"])
def test_multiprocessing(tmp_path, method, workers):
    """Workers of multiprocessing send what they recorded when they end, without being asked."""
    processes = run(
        tmp_path,
        f"""
        import multiprocessing

        def work(name):
            if {method!r} == "spawn":
                instrument()
            infer(name)
            if {method!r} == "spawn":
                otp.TorchInstrumentor().uninstrument()
                provider.force_flush()

        if __name__ == "__main__":
            instrument()
            context = multiprocessing.get_context({method!r})
            workers = [context.Process(target=work, args=(f"Worker{{i}}",)) for i in range({workers})]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            infer("Main")
        """,
    )
    assert by_first_name(processes) == [["Main"], *([f"Worker{number}"] for number in range(workers))]


LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.full((2,), float(index)).mul(2.0)

def load(method, workers=2, **options):
    return sum(
        batch.sum().item()
        for batch in torch.utils.data.DataLoader(
            Data(), num_workers=workers, multiprocessing_context=method, **options
        )
    )
"""


@pytest.mark.parametrize(
    ("detail", "method"),
    [
        ("frames", "spawn"),
        ("metrics", "fork"),
        pytest.param("frames", "fork", marks=pytest.mark.exhaustive),
        pytest.param("metrics", "spawn", marks=pytest.mark.exhaustive),
    ],
)
def test_data_loader_workers_are_silent(tmp_path, method, detail):
    """Workers of a DataLoader export nothing, whichever way they start and whatever the detail; other worker processes do as before."""
    workers = 2 if method == "fork" else 1  # each spawned one imports torch
    processes = run(
        tmp_path,
        f"""
        import multiprocessing, threading
        instrument({detail!r})
        def told(index):
            infer("Worker")
            provider.force_flush()
            running = otp.TorchInstrumentor()._running
            if {detail!r} == "metrics" and running is not None:
                running._look()  # as it does four times a second
            for thread in threading.enumerate():
                if thread.name == "otel-torchprof-silence":
                    thread.join()
            state = otp.TorchInstrumentor().health.sources["recording"]
            open(os.path.join(sys.argv[1], f"health{{index}}"), "w").write(state)
        if __name__ == "__main__":
            assert load({method!r}, {workers}, worker_init_fn=told) == 24
            infer("Main")
            worker = multiprocessing.get_context("fork").Process(target=infer, args=("Other",))
            worker.start()
            worker.join()
        """,
        preamble=PREAMBLE + LOADER,
    )
    off = "off: this is a worker of a DataLoader, see loader_workers"
    assert [(tmp_path / "spans" / f"health{index}").read_text() for index in range(workers)] == [off] * workers
    found = [{"Main", "Other", "Worker"} & set(names(spans)) for spans in processes.values()]
    assert sorted(found, key=str) == ([] if detail == "metrics" else [{"Main"}, {"Other"}])


def test_data_loader_workers_are_under_the_span_that_started_them(tmp_path):
    """Operators of a DataLoader's workers, where they are asked for, join the trace of the span around their start."""
    processes = run(
        tmp_path,
        """
        instrument("ops")
        with tracer.start_as_current_span("epoch") as epoch:
            load("fork")
        context = epoch.get_span_context()
        (open(os.path.join(sys.argv[1], "epoch"), "w")).write(f"{context.trace_id} {context.span_id}")
        """,
        preamble=PREAMBLE + LOADER,
        OTEL_TORCHPROF_LOADER_WORKERS="true",
    )
    trace_id, span_id = map(int, (tmp_path / "spans" / "epoch").read_text().split())
    workers = [spans for spans in processes.values() if "aten::mul" in names(spans)]
    assert len(workers) == 2
    for spans in workers:
        multiplied = [span for span in spans if span["name"] == "aten::mul"]
        assert len(multiplied) == 2
        assert {(span["trace"], span["parent"]) for span in multiplied} == {(trace_id, span_id)}


def test_torch_may_come_later(tmp_path):
    """Instrumented before torch is imported: nothing of torch is imported by that, and all is seen once it is."""
    preamble = PREAMBLE.replace("import torch\n", "")
    processes = run(
        tmp_path,
        """
        instrument("ops")
        assert "torch" not in sys.modules
        import torch
        infer("Late")
        """,
        preamble=preamble,
        command=(sys.executable,),
    )
    (spans,) = processes.values()
    assert {"Late", "aten::linear"} <= set(names(spans))


def test_the_provider_may_come_later(tmp_path):
    """Instrumented before the SDK is set up: recording begins when the provider is there."""
    preamble = PREAMBLE.replace("trace.set_tracer_provider(provider)\n", "")
    processes = run(
        tmp_path,
        """
        import threading
        otp.TorchInstrumentor().instrument(detail="modules")
        infer("Early")
        trace.set_tracer_provider(provider)
        waiting = next(t for t in threading.enumerate() if t.name == "otel-torchprof-wait")
        waiting.join(60)
        infer("Late")
        """,
        preamble=preamble,
    )
    (spans,) = processes.values()
    assert names(spans) == ["torch.phase.inference", "Late"]


TRAINING = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
INITIALIZED = """
from opentelemetry.instrumentation.auto_instrumentation import initialize
initialize()
"""
"""What opentelemetry-instrument has an interpreter execute before the program."""
AUTO = (
    sys.executable,
    "-c",
    "from opentelemetry.instrumentation import auto_instrumentation as a; a.run()",
    sys.executable,
)


def configured_by_the_sdk(folder: Path) -> None:
    """What opentelemetry-distro adds to an environment: that the SDK is set up from its variables.

    It insists on other versions of OpenTelemetry's packages than the newest, so its entry point alone stands in for it here.
    """
    info = folder / "distro-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: distro\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[opentelemetry_configurator]\nsdk = opentelemetry.sdk._configuration:_OTelSDKConfigurator\n"
    )


TRACES_ALONE = {
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
    "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "fastapi",
}


@pytest.mark.parametrize(("policy", "has_operators"), [("", False), ("keep=all", True), ("max_spans=1000", True)])
def test_without_code_the_detail_of_slow_steps_is_kept(tmp_path, policy, has_operators):
    """Under opentelemetry-instrument steps that are not slow have no operators below them, unless a policy is given."""
    environment = {
        "OTEL_TRACES_EXPORTER": "otlp_file",
        **TRACES_ALONE,
        "OTEL_TORCHPROF_OTLP_FILE": str(tmp_path / "trace.jsonl"),
        "OTEL_TORCHPROF_DETAIL": "ops",
        "OTEL_TORCHPROF_POLICY": policy,
    }
    configured_by_the_sdk(tmp_path)
    run(tmp_path, TRAINING, preamble=INITIALIZED, **environment)
    text = (tmp_path / "trace.jsonl").read_text()
    assert '"name":"torch.step"' in text
    assert ('"name":"aten::addmm"' in text) is has_operators


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["torch.setup", *(f"ProfilerStep#{number}" for number in range(3)), "torch.job"]),
        ({"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "torch"}, []),
        *(
            pytest.param(environment, [], marks=pytest.mark.exhaustive)  # as in a program that instruments itself
            for environment in (
                {"OTEL_TORCHPROF_DETAIL": "off"},
                {"OTEL_TORCHPROF_ENABLED": "false"},
                {"OTEL_SDK_DISABLED": "true"},
            )
        ),
    ],
)
def test_no_code_changes(tmp_path, environment, expected):
    """Under opentelemetry-instrument a training script gives its steps as a Chrome trace, unless it is switched off."""
    environment = {
        "OTEL_TRACES_EXPORTER": "chrome",
        **TRACES_ALONE,
        "OTEL_TORCHPROF_CHROME_TRACE": str(tmp_path / "trace.json"),
        **environment,
    }
    configured_by_the_sdk(tmp_path)
    by_command = {"preamble": "", "command": AUTO}
    run(tmp_path, TRAINING, **(by_command if expected else {"preamble": INITIALIZED}), **environment)
    path = tmp_path / "trace.json"
    events = json.loads(path.read_text()) if path.exists() else []
    events = events["traceEvents"] if isinstance(events, dict) else events
    slices = [event["name"] for event in events if event.get("ph") == "X"]
    # In the order in which they were written, which depends on when the recorder was drained.
    assert sorted(name for name in slices if not name.startswith("torch.phase.")) == sorted(expected)
    assert ("torch.phase.forward" in slices) is bool(expected)
