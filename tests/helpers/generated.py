"""Files that are made from code: pages, their tables, schemas, a docstring."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def check(path: Path, text: str) -> None:
    """A file has this text; ``make generated``, which sets ``GOLDEN_ACCEPT``, writes it."""
    if os.environ.get("GOLDEN_ACCEPT"):
        path.write_text(text)
    assert path.read_text() == text, f"{path.name} is not what the code says: `make generated` writes it"
