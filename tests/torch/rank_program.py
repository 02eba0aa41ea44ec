"""A rank of a distributed program that is instrumented in several ways, one after the other: what test_torchrun.py looks at.

``torchrun --nproc-per-node 4 rank_program.py FOLDER``, or ``launched.py``; each phase writes ``FOLDER/<phase>/<pid>.jsonl`` and each rank
``FOLDER/<rank>.json``.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from jsonl_exporter import JsonLinesExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import otel_torchprof as otp

STEPS = 3
PHASES = {
    "before": {"detail": "steps"},
    "apart": {"detail": "ops"},
    "together": {"detail": "modules", "ranks": "together"},
    "sampled": {"detail": "steps", "ranks": "together"},
    "one": {"detail": "ops", "export_ranks": "one"},
}
SAMPLED_STEPS = 20


def train(model: torch.nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(folder: Path, phase: str, work) -> dict[str, object]:
    """Runs ``work`` instrumented; what the rank knows of itself then."""
    (folder / phase).mkdir(exist_ok=True)
    resource = Resource({"service.name": "ranks"} | ({"torch.run.id": "mine"} if phase == "sampled" else {}))
    sampler = TraceIdRatioBased(0.5) if phase == "sampled" else None
    provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(otp.TorchSpanProcessor(JsonLinesExporter(folder / phase)))
    otp.TorchInstrumentor().instrument(tracer_provider=provider, **PHASES[phase])
    work()
    context = otp.step_context(2, 1)
    found = {
        "sources": dict(otp.TorchInstrumentor().health.sources),
        "context": [context.trace_id, context.span_id] if context else None,
        "resource": {key: value for key, value in otp.rank_resource().attributes.items() if "groups" not in key},
        "hooks": dist.distributed_c10d._update_default_pg.__module__,
    }
    otp.TorchInstrumentor().uninstrument()
    provider.shutdown()
    return found


def main(path: str) -> None:
    folder = Path(path)
    random.seed(0)  # as training scripts do, alike on all ranks
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    info: dict[str, object] = {}

    def join() -> None:
        dist.init_process_group("gloo")
        train(DistributedDataParallel(model), STEPS)

    info["before"] = recorded(folder, "before", join)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = DistributedDataParallel(model)
    for phase in ("apart", "together", "one"):
        info[phase] = recorded(folder, phase, lambda: train(parallel, STEPS))
    info["sampled"] = recorded(folder, "sampled", lambda: train(parallel, SAMPLED_STEPS))
    info["after"] = dist.distributed_c10d._update_default_pg.__module__
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(info))
    assert mesh is not None
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
