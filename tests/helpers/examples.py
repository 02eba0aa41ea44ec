"""Which examples of a test `make test` runs, where one more shows what the others show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def one_in(count: int, examples: Iterable[Any]) -> list[Any]:
    """The examples as parameters, all but each ``count``-th of which only `make test-all` and CI run."""
    return [
        pytest.param(example, marks=pytest.mark.exhaustive if number % count else ())
        for number, example in enumerate(examples)
    ]
