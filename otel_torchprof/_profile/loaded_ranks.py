"""``load_ranks``: the trace files of a job as profiles by rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from otel_torchprof._answers.verdicts import explain
from otel_torchprof._export.formats import TRACES
from otel_torchprof._files.box_file import SUFFIX
from otel_torchprof.errors import TorchProfError

from .loaded import LoadedProfile, checked_limit, load

if TYPE_CHECKING:
    from otel_torchprof._answers.explanation import Explanation

_SUFFIXES = (*(suffix for each in TRACES.values() for suffix in each.suffixes), SUFFIX)


class LoadedRanks(Mapping[int, LoadedProfile]):
    """The profiles of a job by rank: see :func:`load_ranks`. Read-only, hence thread-safe.

    Examples:
        >>> with otp.profile() as prof:
        ...     y = torch.ones(3) + 1
        >>> prof.add_metadata_json("distributedInfo", '{"rank": 2}')
        >>> prof.export_chrome_trace("trace.json")
        >>> otp.load_ranks(["trace.json"])
        <profiles of rank 2>
    """

    def __init__(self, profiles: Mapping[int, LoadedProfile]) -> None:
        self._profiles = dict(sorted(profiles.items()))

    def __getitem__(self, rank: int) -> LoadedProfile:
        return self._profiles[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._profiles)

    def __len__(self) -> int:
        return len(self._profiles)

    def explain(self) -> Explanation:
        """Explains the steps of all ranks, and which one is late, as :func:`otel_torchprof.explain` does. Reads the files again.

        Raises:
            TorchProfError: a file cannot be read, is a black box, or has no steps.
        """
        return explain(*(prof.path for prof in self.values()))

    def __repr__(self) -> str:
        ranks = ", ".join(map(str, self._profiles))
        return f"<profiles of rank{'s' if len(self) > 1 else ''} {ranks}>"


def load_ranks(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, memory_limit: int | None = None
) -> LoadedRanks:
    """Reads the traces of several ranks: a profile by rank, as :func:`load` gives each. Reads as many at a time as there are processors.

    Args:
        paths: a folder, of which all files are read whose names are those of traces or black boxes; or files. A merged
            file in a folder is left out.
        memory_limit: most bytes of the columns of all files. Default: half of the free memory.

    Raises:
        TorchProfError: a file cannot be read or does not say its rank, two are of one rank, or there is no file.
        ValueError: the limit is no number of bytes.

    Examples:
        >>> with otp.profile() as prof:
        ...     y = torch.ones(3) + 1
        >>> prof.add_metadata_json("distributedInfo", '{"rank": 0}')
        >>> prof.export_chrome_trace("trace.json")
        >>> [(rank, prof.self_cpu_time_total > 0) for rank, prof in otp.load_ranks(["trace.json"]).items()]
        [(0, True)]
    """
    names = _files(paths)
    limit = checked_limit(memory_limit) // len(names)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        loaded = list(pool.map(partial(load, memory_limit=max(limit, 1)), names))
    profiles: dict[int, LoadedProfile] = {}
    for name, prof in zip(names, loaded, strict=True):
        if prof.is_merged and isinstance(paths, str | os.PathLike):
            continue
        if prof.rank is None:
            raise TorchProfError(f"{name!r} does not say of which rank it is: load() reads it alone")
        if prof.rank in profiles:
            raise TorchProfError(
                f"{name!r} is of rank {prof.rank}, as {profiles[prof.rank].path!r}: give one file per rank"
            )
        profiles[prof.rank] = prof
    if not profiles:
        raise TorchProfError(f"{str(paths)!r} has merged traces only: load() reads one")
    return LoadedRanks(profiles)


def _files(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    if isinstance(paths, str | os.PathLike):
        folder = Path(paths)
        if not folder.is_dir():
            raise TorchProfError(f"{str(folder)!r} is no folder: give one, or a list of files")
        names = sorted(str(each) for each in folder.iterdir() if is_trace(each.name))
    else:
        names = [os.fspath(path) for path in paths]
    if not names:
        raise TorchProfError(
            f"no traces in {paths!r}: their names end in {', '.join(_SUFFIXES)}, maybe with .gz or .zst"
        )
    return names


def is_trace(name: str) -> bool:
    """Whether a file has the name of a trace or a black box."""
    return name.removesuffix(".gz").removesuffix(".zst").endswith(_SUFFIXES)
