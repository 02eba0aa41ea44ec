"""Compiles the torch library for releases of torch, for a wheel to carry: ``make wheels`` calls it.

    python native/prebuild.py FOLDER TORCH...

Each TORCH is a wheel of torch, the folder of an installed one, or a release, whose wheel is downloaded (up to 900 MB). Its headers are
read and nothing of it is run. What is made is linked against empty libraries that have the names of torch's: in a process with torch
the loader takes those that are there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from otel_torchprof._native import prebuilt, torch_build
from otel_torchprof._native.torch_build import BuildTarget

LIBRARIES = ("torch_cpu", "c10")


def _versions(text: str) -> tuple[str, str]:
    """The release and the commit that ``torch/version.py`` tells."""
    found = (
        re.search(r"^__version__ = '([^'+]+)", text, re.MULTILINE),
        re.search(r"^git_version = '(\w+)'", text, re.MULTILINE),
    )
    if not all(found):
        raise SystemExit("torch/version.py says no version and no commit: is this a wheel of torch?")
    release, commit = (match[1] for match in found if match)
    return release, commit


def _downloaded(release: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), f"torch=={release}"]
    subprocess.run(pip, check=True)  # noqa: S603 - our own command line, no shell
    return next(folder.glob("*.whl"))


def _unpacked(given: str, folder: Path) -> Path:
    """The folder ``torch`` of a wheel or of an installation, with headers and ``version.py`` at least."""
    source = Path(given)
    if source.is_dir():
        return source
    with zipfile.ZipFile(source if source.suffix == ".whl" else _downloaded(given, folder)) as wheel:
        names = [name for name in wheel.namelist() if name.startswith("torch/include/") or name == "torch/version.py"]
        wheel.extractall(folder, names)
    return folder / "torch"


def _abis(release: str) -> tuple[int, ...]:
    """The C++ ABIs that a release comes with: those for CUDA up to 2.6 had the old one."""
    return (0, 1) if tuple(map(int, release.split(".")[:2])) <= (2, 6) else (1,)


def _stand_ins(folder: Path) -> Path:
    for name in LIBRARIES:
        library = folder / f"lib{name}.so"
        command = [
            torch_build.compiler(),
            "-shared",
            "-x",
            "c",
            "/dev/null",
            f"-Wl,-soname,{library.name}",
            "-o",
            str(library),
        ]
        subprocess.run(command, check=True)  # noqa: S603 - our own command line, no shell
    return folder


def _built(given: str, output: Path, sources: str) -> list[prebuilt.Library]:
    """The libraries for one torch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch = _unpacked(given, folder)
        release, commit = _versions((torch / "version.py").read_text())
        stand_ins, include = _stand_ins(folder), torch / "include"
        found = []
        for abi in _abis(release):
            built = folder / f"torch_ops-{release}-abi{abi}.so"
            torch_build.compile_whole(BuildTarget(release, commit, abi, include, stand_ins), built)
            file = Path(shutil.copy(built, output))
            digests = prebuilt.digest(file), sources, prebuilt.headers_digest(include)
            found.append(prebuilt.Library(file.name, digests[0], release, commit, abi, digests[1], digests[2]))
            sys.stdout.write(f"{file.name}: {file.stat().st_size / 1e3:.0f} KB\n")
        return found


def main(output: Path, given: list[str]) -> None:
    """Fills the folder anew."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    digest = torch_build.sources_digest()
    prebuilt.write_list(output, [library for torch in given for library in _built(torch, output, digest)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
