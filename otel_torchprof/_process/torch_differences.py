"""Differences between the supported versions of torch."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any, NamedTuple


class Differences(NamedTuple):
    """Behaviour of one version; the defaults are the newest version's."""

    averages_have_python_functions: bool = False
    """``key_averages`` includes calls of Python functions by default."""
    takes_use_cuda: bool = False
    """Profilers have the argument ``use_cuda``, with a warning."""
    warns_of_modules: bool = True
    """``with_modules`` is deprecated, with a warning."""
    names_wrong_activities: bool = True
    """The error names values that are not activities even if there are no others."""
    warns_of_cycles: bool = True
    """Whether a cycle of a schedule warns when it clears the events of the previous one."""


_SINCE: dict[tuple[int, int], Differences] = {
    (2, 6): Differences(
        takes_use_cuda=True, warns_of_modules=False, names_wrong_activities=False, warns_of_cycles=False
    ),
    (2, 10): Differences(takes_use_cuda=True, warns_of_modules=False, names_wrong_activities=False),
    (2, 12): Differences(
        averages_have_python_functions=True, takes_use_cuda=True, warns_of_modules=False, names_wrong_activities=False
    ),
    (2, 14): Differences(),
}
"""By the first version with that behaviour, oldest first; each is valid until the next."""


_WITHOUT_TORCH = Differences(averages_have_python_functions=True)
"""The newest's, but that calls of Python functions are what there is to add up."""


@functools.cache
def _of(version: str) -> Differences:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    own = (int(numbers[1]), int(numbers[2])) if numbers else max(_SINCE)
    earlier = [since for since in _SINCE if since <= own]
    return _SINCE[max(earlier, default=min(_SINCE))]


def differences() -> Differences:
    """The differences of the torch that this process has imported. Costs a microsecond."""
    torch: Any = sys.modules.get("torch")
    version = getattr(torch, "__version__", None)
    return _WITHOUT_TORCH if version is None else _of(str(version))
