"""One of two ranks that meet over gloo, each recorded into a file of its own: ``merge_program.py FOLDER RANK``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import otel_torchprof as otp

COLLECTIVES = 100


def main(folder: Path, rank: int) -> None:
    """Records the rank, the first one as Chrome JSON and the other as OTLP; then again, without the details of most steps."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    exporter = otp.OTLPFileExporter(folder / "1.otlp") if rank else otp.ChromeTraceExporter(folder / "0.json.gz")
    short = otp.OTLPFileExporter(folder / f"short{rank}.otlp")
    for each, keep in ((exporter, "all"), (short, "slow")):
        with otp.stream(each, detail="ops", policy=otp.SpanPolicy(keep=keep)) as streamed:
            for _ in range(COLLECTIVES):
                if rank:  # the other one waits for it: longer than a busy machine takes to wake a thread
                    torch.ones(300, 300).mm(torch.ones(300, 300))
                dist.all_reduce(torch.ones(8))
                streamed.step()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
