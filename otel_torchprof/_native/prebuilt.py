"""The libraries that come with a wheel, one per release of torch, so that recording operators needs no compiler.

``prebuilt/libraries.json`` lists them; ``make wheels`` makes both (``native/prebuild.py``). One is taken where everything that it was
built from is the same: this package's sources, torch's commit, the C++ ABI, and the headers of torch that the sources name, where
they are installed. For any other torch (a distribution's, a nightly, one of one's own) the library is compiled.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import torch_build

if TYPE_CHECKING:
    from collections.abc import Iterable

FOLDER = Path(__file__).resolve().parent / "prebuilt"
LIST = "libraries.json"


class Library(NamedTuple):
    """A prebuilt library."""

    file: str
    sha256: str
    torch: str
    """Torch's release, for messages."""
    git_version: str
    cxx11_abi: int
    sources: str
    """Digest of this package's sources and of the compiler's flags."""
    headers: str
    """Digest of torch's headers: see :func:`headers_digest`."""


def headers_digest(include: Path) -> str:
    """Returns the digest of torch's headers that the sources include, which define the objects that they read.

    Raises:
        OSError: one of them is missing or cannot be read.
    """
    named = sorted(
        {
            name
            for path in torch_build.source_files()
            for name in re.findall(r"^ *#include <((?:ATen|c10|torch)/[^>]+)>", path.read_text(), re.MULTILINE)
        }
    )
    import hashlib  # as in torch_build

    digest = hashlib.sha256()
    for name in named:
        first, second = (folder / name for folder in torch_build.include_folders(include))
        path = first if first.exists() else second
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def listed(folder: Path) -> list[Library]:
    """The libraries in a folder; empty without a list, as in a checkout."""
    try:
        entries = json.loads((folder / LIST).read_text())
    except FileNotFoundError:
        return []
    return [Library(**entry) for entry in entries]


def write_list(folder: Path, libraries: Iterable[Library]) -> None:
    """Lists what lies in a folder."""
    (folder / LIST).write_text(json.dumps([library._asdict() for library in libraries], indent=1) + "\n")


def find(torch: Any) -> Path | None:
    """The library for the installed torch; None where none fits. Costs a millisecond, and three more where one does."""
    if not torch.distributed.is_available():  # not a release build of torch
        return None
    target = torch_build.BuildTarget.of(torch)
    version = target.git_version, target.cxx11_abi, torch_build.sources_digest()
    for library in listed(FOLDER):
        if (library.git_version, library.cxx11_abi, library.sources) == version:
            path = FOLDER / library.file
            try:
                return path if _is_of(target, library) and digest(path) == library.sha256 else None
            except OSError:  # a file or a header is missing: the compiler will name it
                return None
    return None


def _is_of(target: torch_build.BuildTarget, library: Library) -> bool:
    """Whether torch's headers are those of the build; an image may lack them."""
    return not target.include.is_dir() or headers_digest(target.include) == library.headers


def digest(path: Path) -> str:
    """Digest of a file of the package. The list of digests is as trusted as the package's code."""
    import hashlib  # as in torch_build

    return hashlib.sha256(path.read_bytes()).hexdigest()
