"""Writes the sources of the documentation's site: ``python docs/make/site_sources.py FOLDER``.

The pages of docs/ link to files of the repository outside of docs/. The site is read from files, on any machine, so it has copies of
those files under ``repository/``, and of what they link to in turn; links are rewritten to the copies.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)(?=[)#\s])")


class SiteSources:
    """The files of a site, each copied once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copied: set[Path] = set()
        self.broken: list[str] = []
        """Links that go to no file of the repository."""

    def copy(self, path: Path) -> None:
        """Copies a file of the repository, and all files that it links to."""
        if path in self._copied:
            return
        self._copied.add(path)
        target = self._target(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            shutil.copyfile(path, target)
            return
        parts = _FENCED.split(path.read_text())
        parts[::2] = [_LINK.sub(lambda link: self._link(path, link[0]), part) for part in parts[::2]]
        target.write_text("".join(parts))

    def _target(self, path: Path) -> Path:
        inside = path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT)
        return self._folder / inside if path.is_relative_to(DOCS) else self._folder / "repository" / inside

    def _link(self, page: Path, link: str) -> str:
        linked = (page.parent / link).resolve()
        if linked.is_dir():
            linked /= "README.md"
        if not linked.is_file() or not linked.is_relative_to(ROOT):
            self.broken.append(f"{page.relative_to(ROOT)}: {link}")
            return link
        self.copy(linked)
        return Path(os.path.relpath(self._target(linked), self._target(page).parent)).as_posix()


def main() -> None:
    """Writes the sources into an empty folder."""
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    sources = SiteSources(folder)
    for path in sorted(DOCS.rglob("*")):
        if path.is_file() and path.suffix != ".py":
            sources.copy(path)
    if sources.broken:
        raise SystemExit("\n".join(["Links that go to no file of the repository:", *sources.broken]))


if __name__ == "__main__":
    main()
