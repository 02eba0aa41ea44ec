"""Chrome JSON of the power of devices over time: counters, which viewers draw as curves beside the trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._tree.energy import curves_of

from .chrome_json import compact, microseconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_torchprof._columns.batch import Batch


def pieces(batch: Batch, base_ns: int, pid: int) -> Iterator[bytes]:
    """The lines of JSON, a piece per device; none where no energy counter was read.

    A track ``GPU 0 power`` for each, with one series, ``W``: the power between each reading and the next, held until then.
    """
    if batch.energy is None:
        return
    for index, (times, readings) in curves_of(batch.energy):
        apart = np.flatnonzero(np.append(times[1:] > times[:-1], True))
        time, joules = times[apart], readings[apart]
        watts = np.diff(joules) / (np.diff(time) / 1e9)
        head = compact({"ph": "C", "name": f"GPU {index} power", "pid": pid, "tid": 0})[:-1]
        samples = zip(time.tolist(), np.append(watts, watts[-1:]).tolist(), strict=False)
        yield "".join(
            f',\n{head},"ts":{microseconds(at - base_ns)},"args":{compact({"W": round(power, 3)})}}}'
            for at, power in samples
        ).encode()
