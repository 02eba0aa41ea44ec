"""Which examples of a test `make test` runs, where one more shows what the others show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterable


def one_in(count: int, examples: Iterable[Any]) -> list[Any]:
    """The examples as parameters, all but each ``count``-th of which only `make test-all` and CI run."""
    return [
        pytest.param(example, marks=pytest.mark.exhaustive if number % count else ())
        for number, example in enumerate(examples)
    ]


def random_examples(count: int) -> settings:
    """So many random ones, without a deadline; of them `make test` draws as small a part as of those of other tests."""
    return settings(max_examples=max(count * settings.default.max_examples // 100, 1), deadline=None)
