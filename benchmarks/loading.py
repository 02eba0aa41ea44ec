"""Trace files read: torch's own of some 270,000 events beside JSON's libraries, and ours from 10^5 to 10^7 events.

Each reading in a process of its own, in turn: what a command would take, without the start
of the interpreter and imports. Peers only parse, but for HolisticTraceAnalysis, which also makes its table; it is measured where it is
installed (``pip install HolisticTraceAnalysis==0.5.0``).
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from children import memory, memory_at_a_new_peak, once
from harness import OURS, Budget, Row, Settings, rows

if TYPE_CHECKING:
    from collections.abc import Callable

_STEPS = 6_500
"""Of the training of one small layer, some 40 events each."""
_SIZES = (100_000, 1_000_000, 10_000_000)
_ROUNDS = 5
_JSON, _MSGSPEC, _HTA = "json.load without the collector", "msgspec with types", "HolisticTraceAnalysis"
_EXPLAIN = "explain"


def measure(settings: Settings) -> list[Row]:
    """Times and memory of all readers."""
    rounds = settings.rounds_or(_ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "torch.json"
        events = once(__file__, "kineto", str(trace), str(_STEPS))["events"]
        table = _of_torch(trace, int(events), rounds)
        for size in _SIZES[: 2 if settings.quick else 3]:
            table += _ours(Path(folder) / f"{size}.json", size, min(rounds, 3))
    return table


def _of_torch(trace: Path, events: int, rounds: int) -> list[Row]:
    what = f"torch's trace of {events:,} events, {trace.stat().st_size / 1e6:.0f} MB"
    readers = {OURS: "load", "explain": _EXPLAIN, _JSON: "json", _MSGSPEC: "msgspec", _HTA: "hta"}
    absent = [who for who, module in ((_MSGSPEC, "msgspec"), (_HTA, "hta")) if importlib.util.find_spec(module) is None]
    found: dict[str, list[dict[str, float]]] = {who: [] for who in readers if who not in absent}
    for _ in range(rounds):
        for who, costs in found.items():
            costs.append(once(__file__, readers[who], str(trace)))
    seconds = {who: [(each["wall"], each["processor"]) for each in costs] for who, costs in found.items()}
    memory = {who: [each["peak"] for each in costs] for who, costs in found.items()}
    budgets = {OURS: Budget(_JSON, 0.5), "explain": Budget(_JSON, 0.7)}
    missing = [Row(what, who, (), "s", absent="it is not installed") for who in absent]
    return [
        *rows(f"{what}: averages; {_EXPLAIN}; parsed", "s", seconds, budgets),
        *missing,
        *rows(f"{what}: memory at the peak", "MB", memory),
    ]


def _ours(trace: Path, size: int, rounds: int) -> list[Row]:
    """Per event, of a profile of so many events that was exported."""
    events = once(__file__, "ours", str(trace), str(size // 40))["events"]
    table: list[Row] = []
    for who in ("load", _EXPLAIN):
        costs = [once(__file__, who, str(trace)) for _ in range(rounds)]
        what = f"ours of {int(events):,} events: {who}"
        table += rows(f"{what}, per event", "ns", {OURS: [each["processor"] / events * 1e9 for each in costs]})
        table += rows(
            f"{what}, memory at the peak, per event", "B", {OURS: [each["peak"] / events * 1e6 for each in costs]}
        )
    trace.unlink()
    return table


# ---- In these processes ----


def _kineto(path: str, steps: str) -> dict[str, float]:
    from recorders import kineto
    from workloads import small_training

    with kineto(shapes=True) as prof:
        small_training(int(steps))
    prof.export_chrome_trace(path)
    return {"events": len(prof.function_events)}


def _profile(path: str, steps: str) -> dict[str, float]:
    from recorders import ours
    from workloads import small_training

    with ours(memory_limit=8 << 30) as prof:
        small_training(int(steps))
    prof.export_chrome_trace(path)
    return {"events": len(prof.columns["start"])}


def _load(path: str) -> None:
    import otel_torchprof as otp

    otp.load(path).key_averages()


def _explain(path: str) -> None:
    from otel_torchprof._cli.main import main

    with contextlib.redirect_stdout(io.StringIO()):
        main(["explain", path])


def _json(path: str) -> None:
    gc.disable()
    with Path(path).open() as file:
        json.load(file)


def _msgspec(path: str) -> None:
    import msgspec

    numbers = [("ts", float, 0.0), ("dur", float, 0.0), ("pid", int | str, 0), ("tid", int | str, 0)]
    event = msgspec.defstruct(
        "Event", [("ph", str), ("name", str, ""), *numbers, ("args", dict[str, Any] | None, None)]
    )
    trace = msgspec.defstruct("Trace", [("traceEvents", list[event])])
    gc.disable()
    msgspec.json.decode(Path(path).read_bytes(), type=trace)


def _hta(path: str) -> None:
    from hta.common.trace import Trace

    Trace(trace_files={0: path}, trace_dir="").parse_traces(use_multiprocessing=False)


_IMPORTS = {
    "load": "otel_torchprof._profile.loaded",
    _EXPLAIN: "otel_torchprof._cli.explain_command",
    "hta": "hta.common.trace",
}
_READERS: dict[str, Callable[[str], None]] = {
    "load": _load,
    _EXPLAIN: _explain,
    "json": _json,
    "msgspec": _msgspec,
    "hta": _hta,
}


def _read(who: str, path: str) -> dict[str, float]:
    """Seconds and MB that reading adds to the process, in which the file is in memory and modules are imported."""
    importlib.import_module(_IMPORTS.get(who, "json"))
    before = memory_at_a_new_peak()
    wall, processor = time.perf_counter(), time.process_time()
    _READERS[who](path)
    cost = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
    return cost | {"peak": (memory("VmHWM") - before) / 1e6}


if __name__ == "__main__":
    makers = {"kineto": _kineto, "ours": _profile}
    done = makers[sys.argv[1]](*sys.argv[2:]) if sys.argv[1] in makers else _read(*sys.argv[1:])
    print(json.dumps(done))
