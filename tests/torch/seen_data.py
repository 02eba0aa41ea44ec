"""Rows for the programs of ``seen_programs.py``: a module of its own, so that workers that are no forks import little else than torch."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info


class Table(Dataset):
    """Rows, and what a worker sees of its process."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> Any:
        if at == 11:
            raise ValueError("the last row")
        worker = get_worker_info()
        seed = -1 if worker is None else worker.seed
        return torch.full((4,), float(at)), torch.rand(1), seed, len(os.environ)
