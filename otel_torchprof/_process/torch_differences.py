"""What supported versions of torch do differently: the one that is imported is the reference."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any, NamedTuple


class Differences(NamedTuple):
    """One version's ways; the defaults are those of the newest."""

    averages_have_python_functions: bool = False
    """``key_averages`` adds up calls of Python functions where it is not told whether to."""
    takes_use_cuda: bool = False
    """Profilers have the argument ``use_cuda``, with a warning."""
    warns_of_modules: bool = True
    """``with_modules`` is deprecated, with a warning."""
    names_wrong_activities: bool = True
    """What is no activity is named in the error where there is nothing else, too."""
    warns_of_cycles: bool = True
    """A schedule's cycle that clears the events of the one before it says so in a warning."""


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
"""By the first version, oldest first; each stands until the next."""


_WITHOUT_TORCH = Differences(averages_have_python_functions=True)
"""The newest's, but that calls of Python functions are what there is to add up."""


@functools.cache
def _of(version: str) -> Differences:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    own = (int(numbers[1]), int(numbers[2])) if numbers else max(_SINCE)
    earlier = [since for since in _SINCE if since <= own]
    return _SINCE[max(earlier, default=min(_SINCE))]


def differences() -> Differences:
    """Those of the torch that this process has imported. Costs a microsecond."""
    torch: Any = sys.modules.get("torch")
    version = getattr(torch, "__version__", None)
    return _WITHOUT_TORCH if version is None else _of(str(version))
