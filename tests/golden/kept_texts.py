"""Texts that are kept in the tests which make them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def check(test_module: dict[str, Any], name: str, run: Callable[[], str]) -> None:
    """Compares what three runs leave with the text of that name; accepts what all three agree on when told to."""
    expected = test_module[name]
    found = [run() for _ in range(3)]
    assert found == [found[0]] * 3
    if os.environ.get("GOLDEN_ACCEPT") and found[0] != expected:
        file = Path(test_module["__file__"])
        source, changed = file.read_text(), f'{name} = """\\\n{found[0]}"""'
        file.write_text(source.replace(f'{name} = """\\\n{expected}"""', changed))
    else:
        assert found[0] == expected
