"""Two ranks that train together over gloo, each with a log of its own: ``rank_steps_program.py FOLDER`` checks and names both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def run(rank: int, folder: Path) -> None:
    """One rank."""
    from instrumented import Instrumented
    from own_counts import Own, check
    from step_programs import Sizes, plain

    torch.manual_seed(rank)
    torch.set_num_threads(1)
    (folder / str(rank)).mkdir()
    own, service = Own(), Instrumented()
    with service.on("steps"):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        plain(own, Sizes(folder / str(rank)), DistributedDataParallel)
        dist.destroy_process_group()
    check(own, service.spans_at_end())
    print(rank, flush=True)  # noqa: T201 - this is its result


def main() -> None:
    folder = Path(sys.argv[1])
    child = os.fork()
    if child == 0:
        run(1, folder)
        return
    run(0, folder)
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
