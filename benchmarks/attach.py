"""What it does to running jobs to be recorded in detail again and again from outside: to four ranks over gloo, and to a service under load.

Each is recorded at ``ops`` by ``otel-torchprof record``, in between it runs as before: how long its steps and requests took outside of
the recordings, beside those of the same processes before and after all of it (A/A), whether ranks were recorded from the same step on,
files are complete, nothing is compiled again, and what is left of the recordings. Fails where anything of that is not so.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from children import Child, answer, memory_without_garbage, unused_port
from harness import NONE, Budget, Row, Settings, rows, timed_twice
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from workloads import small_model

import otel_torchprof as otp
from otel_torchprof._cli.main import main
from otel_torchprof._columns.schema import Kind
from otel_torchprof._native.recorder import recorder_stats

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMES, _WARM_UP = 50, 2
_RANKS, _STEPS, _SERVED_SECONDS, _REQUESTS_A_SECOND = 4, 20, 10, 50
_REST_SECONDS = 2.0
"""After each recording, and so often as there are recordings before the first and after the last one."""
_LEAD_NS = 1_500_000_000
"""Before its first step a recording of steps has begun already."""
_BEFORE, _OUTSIDE, _INSIDE = "not attached to", "outside of the recordings", "in the recordings"
_COMPILED = (("stats", "unique_graphs"), ("frames", "total"))
"""Dynamo's counters: the second one counts every compilation."""
_LEAKS = {"descriptors": "", "threads": "", "sessions": "", "graphs": "", "resident": "KiB"}


def measure(settings: Settings) -> list[Row]:
    """Median, high percentiles and the slowest, with the processor's time; then what is left."""
    times = settings.rounds_or(_TIMES)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OTEL_TORCHPROF_CONTROL"] = f"{folder}/sockets"
        table = _job(Path(folder), times)
        if importlib.util.find_spec("uvicorn") and importlib.util.find_spec("fastapi"):
            return [*table, *_service(Path(folder), times)]
        return [*table, Row("request to a service", _OUTSIDE, (), "ms", absent="uvicorn and fastapi are not installed")]


def _job(folder: Path, times: int) -> list[Row]:
    port = str(unused_port())
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Child(__file__, "_train", str(r), port, str(folder))) for r in range(_RANKS)]
        words, path = ["--all", "--steps", str(_STEPS)], folder / "job.json.gz"
        found = _Attaching(ranks, ranks, words, path, [folder / f"job.rank{r}.json.gz" for r in range(_RANKS)])
        return found.rows("step of a rank", times)


def _service(folder: Path, times: int) -> list[Row]:
    port = str(unused_port())
    with Child(__file__, "_serve", port, str(folder)) as service, Child(__file__, "_ask", port) as client:
        path = folder / "service.json.gz"
        return _Attaching([service], [client], ["--all", "--seconds", str(_SERVED_SECONDS)], path, [path]).rows(
            "request to a service", times
        )


class _Attaching:
    """Records processes again and again, and looks at what they did meanwhile.

    Args:
        recorded: the processes that are recorded.
        timed: those that tell the ends and the costs of their steps or requests.
        words: for ``otel-torchprof record``.
        path: its output.
        files: what that makes.
    """

    def __init__(
        self, recorded: Sequence[Child], timed: Sequence[Child], words: list[str], path: Path, files: Sequence[Path]
    ) -> None:
        self._recorded, self._timed, self._files = recorded, timed, files
        self._words = ["record", *words, "-o", str(path), "-q"]
        for child in {*recorded, *timed}:
            child.said()  # it is ready
        self._inside: list[tuple[int, int]] = []
        self._failed = 0

    def rows(self, what: str, times: int) -> list[Row]:
        """The rows of all."""
        self._attach(_WARM_UP)
        self._inside.clear()
        self._failed = 0
        files, edges, looks = self._written(), [], []
        for work in (_rest, self._attach, _rest):
            looks.append([child.ask("look") for child in self._recorded])
            edges.append(time.time_ns())
            work(times)
            edges.append(time.time_ns())
        looks.append([child.ask("look") for child in self._recorded])
        files = self._written() - files
        costs = [child.ask("end") for child in self._timed]
        if len({len(each["costs"]) for each in costs}) != 1:
            raise RuntimeError(f"the ranks made {[len(each['costs']) for each in costs]} steps")
        what_left = f"{what}, after {times} recordings"
        return [
            *self._costs(what, edges, costs),
            Row(what_left, "recordings that failed", [self._failed], "", Budget()),
            Row(what_left, "files and sockets left", [files], "", Budget()),
            *_left(what_left, looks[1], looks[3]),
            *_left(f"{what}, after {_REST_SECONDS * times:.0f} s without recordings", looks[0], looks[1]),
        ]

    def _written(self) -> int:
        return sum(path.suffix != ".otlp" for path in self._files[0].parent.rglob("*"))

    def _attach(self, times: int) -> None:
        for _ in range(times):
            begin = time.time_ns()
            with contextlib.redirect_stdout(None):
                failed = main(self._words)
            end, recorded = time.time_ns(), [_checked(path) for path in self._files if path.exists()]
            self._failed += bool(failed)
            if len({steps[0].number for steps in recorded if steps}) > 1:
                raise RuntimeError(f"the first steps of the ranks are {[steps[0].number for steps in recorded]}")
            begins = [steps[0].start - _LEAD_NS for steps in recorded if steps]
            self._inside.append((min(begins, default=begin), end))
            _rest(1)

    def _costs(self, what: str, edges: list[int], found: list[dict[str, Any]]) -> list[Row]:
        ends = np.concatenate([each["ends"] for each in found])
        costs = np.concatenate([each["costs"] for each in found]) / 1e6
        inside = np.zeros(len(ends), dtype=np.bool_)
        for begin, end in self._inside:
            inside |= (ends >= begin) & (ends <= end)
        at = np.searchsorted(edges, ends)
        chosen = {_BEFORE: at == 1, NONE: at == 5, _OUTSIDE: (at == 3) & ~inside, _INSIDE: (at == 3) & inside}
        table: list[Row] = []
        for name, of in {
            "median": np.median,
            "p99": lambda each, **_: np.percentile(each, 99, axis=0),
            "p99.9": lambda each, **_: np.percentile(each, 99.9, axis=0),
            "slowest": np.max,
        }.items():
            values = {who: [of(costs[rows_of], axis=0)] for who, rows_of in chosen.items()}
            budget = {_OUTSIDE: Budget(_BEFORE, 1.1)} if name == "p99.9" else {}
            table += rows(f"{what}: {name}", "ms", values, budget)
        return table


def _rest(times: int) -> None:
    time.sleep(_REST_SECONDS * times)


def _checked(path: Path) -> tuple[Any, ...]:
    """The steps of a recording that is as it was asked for; none of one by time."""
    loaded = otp.load(path)
    path.unlink()
    columns, steps = loaded.columns, loaded.steps
    operators = np.sort(columns["start"][columns["kind"] == int(Kind.OPERATOR)])
    spans = [(step.start, step.end) for step in steps] or [(0, operators.max(initial=0) + 1)]
    counts = np.diff(np.searchsorted(operators, spans), axis=1)
    numbers = [step.number for step in steps]
    wanted = [number + numbers[0] for number in range(_STEPS)] if steps else []
    if loaded.is_partial or not counts.all() or numbers != wanted:
        raise RuntimeError(f"{path.name} has the steps {numbers} with {counts.ravel()} operators: {loaded.health}")
    return steps


def _left(what: str, before: list[dict[str, int]], after: list[dict[str, int]]) -> list[Row]:
    return [
        Row(
            what,
            f"{name}, most of a process",
            [max(b[name] - a[name] for a, b in zip(before, after, strict=True))],
            unit,
        )
        for name, unit in _LEAKS.items()
    ]


# ---- the processes ----


def _train(rank: str, port: str, folder: str) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {**address, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(_RANKS)}
    torch.distributed.init_process_group("gloo")
    provider = _instrument(folder)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    model, optimizer, data = (
        torch.compile(layers, backend="eager"),
        torch.optim.SGD(layers.parameters()),
        torch.ones(8, 64),
    )

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        torch.distributed.all_reduce(torch.cat([parameter.grad.flatten() for parameter in layers.parameters()]))
        optimizer.step()

    for _ in range(_STEPS):
        step()
    provider.force_flush()  # from here on it knows its steps
    ended, costs, stops = threading.Event(), _Costs(), torch.zeros(1)
    _listen(ended)
    while not stops.item():
        costs.add(timed_twice(step))
        stops.fill_(ended.is_set())
        torch.distributed.all_reduce(stops)
    costs.tell()


def _serve(port: str, folder: str) -> None:
    import fastapi
    import uvicorn

    _instrument(folder)
    model, app = torch.inference_mode()(small_model()), fastapi.FastAPI()

    @app.get("/")
    async def predict() -> dict[str, float]:
        return {"answer": float(model().sum()), "processor": time.process_time_ns()}

    _listen(threading.Event())
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="error")


def _ask(port: str) -> None:
    """The client: of the processor's time of a request it tells what the service has used since the one before."""
    connection = http.client.HTTPConnection("127.0.0.1", int(port))
    ended, costs, before, due = threading.Event(), _Costs(), 0, 0.0
    while not before:
        with contextlib.suppress(OSError):
            before = _requested(connection)
            continue
        connection.close()
        ended.wait(0.1)
    _listen(ended)
    while not ended.wait(max(due - time.monotonic(), 0)):
        due = max(due, time.monotonic()) + 1 / _REQUESTS_A_SECOND
        begin = time.perf_counter_ns()
        now = _requested(connection)
        costs.add((time.perf_counter_ns() - begin, now - before))
        before = now
    costs.tell()


def _requested(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/")
    return int(json.load(connection.getresponse())["processor"])


class _Costs:
    """Ends of steps or requests, and what they took: wall and processor, ns. Takes its memory at once."""

    def __init__(self) -> None:
        self._rows, self._count = np.full((1_000_000, 3), -1), 0

    def add(self, cost: Any) -> None:
        """Adds the one that ends now."""
        self._rows[self._count % len(self._rows)] = (time.time_ns(), *cost)
        self._count += 1

    def tell(self) -> None:
        """Tells them all."""
        found = self._rows[: self._count]
        answer({"ends": found[:, 0].tolist(), "costs": found[:, 1:].tolist()})


def _instrument(folder: str) -> TracerProvider:
    provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
    provider.add_span_processor(otp.TorchSpanProcessor(otp.OTLPFileExporter(Path(folder, f"{os.getpid()}.otlp"))))
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="steps")
    return provider


def _listen(ended: threading.Event) -> None:
    """Says that it is ready; from then on a thread tells what the process holds, until it is told to end."""

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "look":
                answer(_held())
            else:
                ended.set()

    answer("ready")
    threading.Thread(target=listen, daemon=True).start()


def _held() -> dict[str, int]:
    dynamo = sys.modules.get("torch._dynamo.utils")
    counted = {} if dynamo is None else dynamo.counters
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "sessions": recorder_stats().sessions,
        "graphs": sum(counted[group][name] for group, name in _COMPILED if group in counted),
        "resident": memory_without_garbage() >> 10,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    {each.__name__: each for each in (_train, _serve, _ask)}[sys.argv[1]](*sys.argv[2:])
