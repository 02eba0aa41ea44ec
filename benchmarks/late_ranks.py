"""How soon a late rank raises the alert of examples/observability/rules.yaml, and a hung one its line, and whether the right rank is named.

Jobs of 4 and of 8 gloo ranks, all at once, in a real Prometheus with the rules as they are; their metrics are exported every 15 seconds.
Ranks sleep where others compute: so some eighty fit on two cores, which are busy with them. Each job runs as long as the rules want to see
before they judge; then a rank that is drawn takes 5 % of the step longer until the alert comes, and all are well again until it has ended.
Beside them run as many jobs in which nothing happens. ``python benchmarks/run.py --only late_ranks`` takes an hour, ``--rounds`` are the
runs per size. Each hang is a rank that waits for something else while the others are in a collective.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from children import Child, answer, unused_port
from harness import Budget, Row, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIZES = (4, 8)
_RUNS, _QUIET, _QUIET_RANKS = 20, 10, 2
_STEP_SECONDS, _LATE = 0.4, 0.05
_JOBS = {4: 10, 8: 7}
"""At a time, by their number of ranks."""
_EXPORT_SECONDS = 15
_SEEN_SECONDS = 390.0
"""What the rules want to have seen of a job before they judge it, and half a minute."""
_MOST_SECONDS = 900.0
_HANG_SECONDS, _MOST_HANG_SECONDS = 5, 60.0
_ALERT = "TorchStraggler"


def measure(settings: Settings) -> list[Row]:
    """Seconds from the delay to the alert and from the hang to the line, and what was wrong of it."""
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / each) for each in ("collector", "helpers")]
    runs = settings.rounds_or(_RUNS)
    table = []
    for ranks in _SIZES:
        table += _hangs(ranks, runs)
    return [*table, *_late(runs)]


# ---- late ranks ----


class _Job:
    """Ranks of one job, of which one may be late, and what the alerts said of it."""

    def __init__(self, name: str, ranks: int, endpoint: str, stack: contextlib.ExitStack) -> None:
        self.name, self.ranks = name, ranks
        port = str(unused_port())
        arguments = [(__file__, "_rank", str(r), str(ranks), port, name, endpoint) for r in range(ranks)]
        self.children = [stack.enter_context(Child(*each)) for each in arguments]
        self.seed = [*name.encode()]
        self.delays: list[float] = []
        self.wrong = 0
        """Alerts that named a rank that was not late, or named one when none was."""

    def ready(self) -> None:
        """Waits for all of its ranks."""
        for child in self.children:
            child.said()

    def run(self, alerts: _Alerts, cycles: int, over: threading.Event) -> None:
        """Has a rank be late, so often; then, or without any, watches until it is over."""
        alerts.watch(self, None, _SEEN_SECONDS)
        draw = np.random.default_rng(self.seed)
        for _ in range(cycles):
            late = int(draw.integers(self.ranks))
            self.children[late].ask("late")
            begin = time.monotonic()
            alerts.watch(self, str(late), _MOST_SECONDS)
            self.delays.append(time.monotonic() - begin)
            sys.stderr.write(f"{self.name}: rank {late} after {self.delays[-1]:.0f} s, {self.wrong} others named\n")
            self.children[late].ask("well")
            alerts.ended(self, str(late))
        while cycles == 0 and not over.is_set():
            alerts.watch(self, None, 10.0)


class _Alerts:
    """What the rules of a Prometheus say now, by job."""

    def __init__(self, prometheus: Any) -> None:
        self._prometheus = prometheus
        self._clock = threading.Event()

    def _firing(self, job: _Job) -> set[str]:
        alerts = self._prometheus.ask("alerts")["alerts"]
        of_job = [each for each in alerts if each["labels"].get("job") == job.name and each["state"] == "firing"]
        return {each["labels"]["torch_distributed_rank"] for each in of_job}

    def watch(self, job: _Job, late: str | None, seconds: float) -> None:
        """Until the late rank is named, or for so long; others that are named count once."""
        end, wrong = time.monotonic() + seconds, set()
        while time.monotonic() < end:
            firing = self._firing(job)
            wrong |= firing - {late}
            if late in firing:
                break
            self._clock.wait(1.0)
        job.wrong += len(wrong)

    def ended(self, job: _Job, late: str) -> None:
        """Until no rank is named, and what was late has left the windows of the rules."""
        end = time.monotonic() + _MOST_SECONDS
        while self._firing(job) & {late} and time.monotonic() < end:
            self._clock.wait(1.0)
        self._clock.wait(150.0)


def _late(runs: int) -> list[Row]:
    import prometheus_process

    binary = prometheus_process.any_prometheus()
    if binary is None:
        return [
            Row("late by 5 % of a step: until the alert", "", (), "s", absent=prometheus_process.NO_PROMETHEUS_AT_ALL)
        ]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prometheus, endpoint = stack.enter_context(_watched(folder, binary))
        jobs = {
            ranks: [_Job(f"late-{ranks}-{i}", ranks, endpoint, stack) for i in range(min(count, runs))]
            for ranks, count in _JOBS.items()
        }
        quiet = [_Job(f"quiet-{i}", _QUIET_RANKS, endpoint, stack) for i in range(_QUIET)]
        for job in itertools.chain(*jobs.values(), quiet):
            job.ready()
        begin = time.monotonic()
        _run_all(_Alerts(prometheus), {job: -(-runs // len(of)) for of in jobs.values() for job in of}, quiet)
        return [*itertools.chain(*(_rows(ranks, of) for ranks, of in jobs.items())), *_of_quiet(quiet, begin)]


@contextlib.contextmanager
def _watched(folder: Path, binary: str) -> Iterator[tuple[Any, str]]:
    """A Prometheus with the rules of the example, and where metrics for it go."""
    import prometheus_process
    import scraped
    import yaml
    from dashboards import RULES

    (folder / "rules.yaml").write_text(RULES.read_text("utf-8"))
    with scraped.serving() as (_, port):
        jobs = [{"job_name": "all", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]
        configuration = folder / "prometheus.yaml"
        settings = {"global": {"scrape_interval": "5s"}, "rule_files": ["rules.yaml"], "scrape_configs": jobs}
        configuration.write_text(yaml.safe_dump(settings))
        with prometheus_process.running(binary, folder, configuration) as prometheus:
            yield prometheus, f"http://127.0.0.1:{port}/v1/metrics"


def _run_all(alerts: _Alerts, cycles: dict[_Job, int], quiet: list[_Job]) -> None:
    over = threading.Event()
    threads = [threading.Thread(target=job.run, args=(alerts, count, over)) for job, count in cycles.items()]
    watching = [threading.Thread(target=job.run, args=(alerts, 0, over)) for job in quiet]
    for thread in (*threads, *watching):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    for thread in watching:
        thread.join()


def _rows(ranks: int, jobs: list[_Job]) -> list[Row]:
    what, delays = f"{ranks} ranks, one late by 5 % of the step", [each for job in jobs for each in job.delays]
    return [
        Row(what, "until the alert", delays, "s"),
        Row(what, "not named within 15 minutes", [sum(each >= _MOST_SECONDS for each in delays)], "", Budget()),
        Row(what, "other ranks named", [sum(job.wrong for job in jobs)], "", Budget()),
    ]


def _of_quiet(jobs: list[_Job], begin: float) -> list[Row]:
    what = f"{len(jobs)} quiet jobs of {_QUIET_RANKS} ranks"
    return [
        Row(what, "minutes watched", [(time.monotonic() - begin) / 60], "min"),
        Row(what, "alerts", [sum(job.wrong for job in jobs)], "", Budget()),
    ]


def _rank(rank: str, world: str, port: str, name: str, endpoint: str) -> None:
    """A rank that sleeps and reduces, and is late while it is told to be."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    dist = _joined(rank, world, port)
    import torch

    import otel_torchprof as otp

    resource = Resource({"service.name": name}).merge(otp.rank_resource())
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint), export_interval_millis=_EXPORT_SECONDS * 1000)
    tracers, meters = TracerProvider(resource=resource), MeterProvider([reader], resource=resource)
    tracers.add_span_processor(otp.TorchSpanProcessor())
    instrumentor = otp.TorchInstrumentor()
    instrumentor.instrument(tracer_provider=tracers, meter_provider=meters, detail="steps", steps="program")
    told = _Told()
    draw, total = np.random.default_rng([*name.encode(), int(rank)]), torch.ones(16)
    answer("ready")
    while True:
        work = _STEP_SECONDS * draw.uniform(0.97, 1.03)
        time.sleep(work + (_LATE * _STEP_SECONDS if told.last == "late" else 0.0))
        dist.all_reduce(total)
        total.fill_(1.0)
        instrumentor.step()


def _joined(rank: str, world: str, port: str) -> Any:
    """torch.distributed with its process group, of which this is a rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank)
    os.environ["LOCAL_WORLD_SIZE"] = world
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist


class _Told:
    """What the process that asks has said last; answers at once, on a thread of its own."""

    def __init__(self) -> None:
        self.last = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self.last = line.strip()
            answer(self.last)


# ---- hung ranks ----


def _hangs(ranks: int, runs: int) -> list[Row]:
    found = [_hang(ranks, run) for run in range(runs)]
    what = f"{ranks} ranks, one hangs, hang={_HANG_SECONDS}"
    named = [seconds for seconds, is_right in found if is_right]
    return [
        Row(what, "until a line on stderr names it", named, "s", absent="" if named else "no line named it"),
        Row(what, "another or none named", [len(found) - len(named)], "", Budget()),
    ]


def _hang(ranks: int, run: int) -> tuple[float, bool]:
    """Of a job of its own, since a pause that ended is none: seconds until the first line, and whether that names the rank."""
    port, hung = str(unused_port()), int(np.random.default_rng([ranks, run]).integers(ranks))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        arguments = [(__file__, "_hanging", str(r), str(ranks), port, folder) for r in range(ranks)]
        children = [stack.enter_context(Child(*each)) for each in arguments]
        for child in children:
            child.said()
        begin = time.monotonic()
        children[hung].ask("hang")
        line, took = _first_line(Path(folder), begin + _MOST_HANG_SECONDS), time.monotonic() - begin
        sys.stderr.write(f"{ranks} ranks, rank {hung} hangs: after {took:.1f} s {line}")
        return took, f"hang: rank {hung} is in" in line


def _first_line(folder: Path, deadline: float) -> str:
    """The first line about a hang that any rank writes; empty where none does."""
    while time.monotonic() < deadline:
        for file in folder.glob("stderr-*"):
            for line in file.read_text().splitlines(keepends=True):
                if "hang:" in line and line.endswith("\n"):
                    return line
        time.sleep(0.02)
    return ""


def _hanging(rank: str, world: str, port: str, folder: str) -> None:
    """A rank with a black box that sleeps and reduces, and waits for something else while it is told to."""
    with Path(folder, f"stderr-{rank}").open("wb", buffering=0) as stderr:
        os.dup2(stderr.fileno(), 2)
    dist = _joined(rank, world, port)
    import torch

    import otel_torchprof as otp

    instrumentor = otp.TorchInstrumentor()
    boxes = f"steps,hang={_HANG_SECONDS},{folder}/boxes"
    instrumentor.instrument(detail="metrics", steps="program", blackbox=boxes)
    told, total = _Told(), torch.ones(16)
    for step in itertools.count():
        if told.last == "hang":
            threading.Event().wait()
        time.sleep(0.1)
        dist.all_reduce(total)
        total.fill_(1.0)
        instrumentor.step()
        if step == 20:
            answer("ready")


if __name__ == "__main__":
    {"_rank": _rank, "_hanging": _hanging}[sys.argv[1]](*sys.argv[2:])
