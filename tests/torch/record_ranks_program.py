"""Ranks that train together over gloo until a file tells them to stop; each may be asked over its control socket."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: str) -> None:
    """One rank."""
    from instrumented import Instrumented

    import otel_torchprof as otp
    from otel_torchprof._instrument import step_choice

    step_choice._SHARED_NS = 10**12  # the machine may be busy
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    service = Instrumented(drained_every=100)
    with service.on("steps", sampling=False):
        parameter = torch.nn.Parameter(torch.ones(8, 8))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        stops, begun = torch.zeros(1), Path(folder, f"begun{os.environ['RANK']}")
        while not stops.item():
            optimizer.zero_grad()
            (parameter @ parameter).sum().backward()
            optimizer.step()
            stops[0] = Path(folder, "stop").exists()
            dist.all_reduce(stops)
            otp.TorchInstrumentor().step()
            begun.touch()
    service.provider.shutdown()
    dist.destroy_process_group()
