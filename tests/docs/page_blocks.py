"""The code blocks of a page of the documentation, and a program that runs them.

``python -m page_blocks PAGE`` runs the blocks of a page from top to bottom in the current folder: ``python`` blocks in one namespace,
``sh`` blocks each in a shell. ``yaml``, ``json`` and ``toml`` blocks are parsed, ``text`` blocks are output, which nothing checks.

Comments in the page that readers do not see::

    <!-- setup
    x = 1     # Python that runs here, in the namespace of the page
    -->

    <!-- not run: the reason -->   before a block that cannot run here
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|^(?:<!-- not run: (?P<reason>[^\n]*) -->\n+)?(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_RUN = {"python", "sh"}
_PARSED = {"yaml", "json", "toml"}
LANGUAGES = _RUN | _PARSED | {"text", "ini", "mermaid", "sql"}
"""What a block may say that it is."""


class Block(NamedTuple):
    """A block of code in a page."""

    line: int
    language: str
    """``setup`` for one that readers do not see."""
    text: str
    reason: str
    """Why it is not run; empty where it is."""


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in its order."""
    source = page.read_text()
    return [_block(source, found) for found in _BLOCK.finditer(source)]


def _block(source: str, found: re.Match[str]) -> Block:
    if found["setup"] is not None:
        return Block(source.count("\n", 0, found.start("setup")) + 1, "setup", found["setup"], "")
    indent = len(found["indent"])
    text = "".join(line[indent:] for line in found["text"].splitlines(keepends=True))
    return Block(source.count("\n", 0, found.start("text")) + 1, found["language"], text, found["reason"] or "")


def run(page: Path) -> None:
    """Runs the blocks of a page in the current folder.

    Raises:
        Exception: what the code of a block raises; the traceback has the page and the line.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.reason:
            continue
        if block.language in {"python", "setup"}:
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)  # noqa: S102 - the page's own
        elif block.language == "sh":
            sys.stdout.write(f"{page.name}:{block.line}\n")
            sys.stdout.flush()
            subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True)
        elif block.language in _PARSED:
            _parse(block)


def _parse(block: Block) -> None:
    if block.language == "yaml":
        import yaml

        list(yaml.safe_load_all(block.text))
    elif block.language == "json":
        json.loads(block.text)
    elif sys.version_info >= (3, 11):
        import tomllib

        tomllib.loads(block.text)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
