"""Records what torch's own profiler writes of a few training steps, and its averages: ``python record.py FOLDER``.

Two files for each recording: ``torch_VERSION_NAME.json.gz``, byte by byte as torch wrote it but for paths and the name of the machine,
and ``torch_VERSION_NAME.averages.json``, by name calls, total and self time in ns.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(48, 16), torch.randint(0, 4, (48,))), batch_size=8
)


def scrubbed(text: str) -> str:
    """Without what tells the machine."""
    folders = {
        Path(torch.__file__).parents[1]: "site-packages",
        Path(os.__file__).parent: "python",
        Path(__file__).resolve().parent: "project",
        Path(sys.prefix): "venv",
        Path(sys.base_prefix): "base",
    }
    for folder, name in folders.items():
        text = text.replace(str(folder), name)
    return re.sub(r'"/(tmp|root|home)/[^"]*"', '"path"', text.replace(socket.gethostname(), "host"))


def record(folder: Path, name: str, steps: int, **options: Any) -> None:
    """Writes the files of one recording."""
    steps_recorded = schedule(wait=0, warmup=2, active=steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=steps_recorded, **options) as prof:
        for inputs, targets in data:
            optimizer.zero_grad()
            with torch.profiler.record_function("loss"):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            prof.step()
    path = folder / f"torch_{torch.__version__.partition('+')[0]}_{name}"
    with tempfile.TemporaryDirectory() as temporary:
        written = Path(temporary) / "trace.json"
        prof.export_chrome_trace(str(written))
        text = scrubbed(written.read_bytes().decode())
    path.with_name(f"{path.name}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    averages = {
        each.key: [each.count, round(each.cpu_time_total * 1000), round(each.self_cpu_time_total * 1000)]
        for each in prof.key_averages()
    }
    lines = ",\n".join(f"{json.dumps(key)}: {row}" for key, row in sorted(averages.items()))
    path.with_name(f"{path.name}.averages.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]), "steps", 3, record_shapes=True, profile_memory=True)
    record(Path(sys.argv[1]), "stacks", 2, with_stack=True)
