"""Code in the documentation runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fault_server import GrpcReceiver
from forked_commands import commands
from page_blocks import LANGUAGES, blocks_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
LIMIT_SECONDS = 300
FROM_NOTHING = {"README", "install"}
"""Pages whose commands, and which themselves, are started by new interpreters, as readers do; those of the others are forked."""


def environment() -> dict[str, str]:
    """The environment of the tests without OpenTelemetry's settings, with the commands of this interpreter first on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_") or "BUILD_DIR" in name}
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "helpers"), os.environ.get("PYTHONPATH", "")]
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """A folder with commands that begin at once."""
    with commands(tmp_path_factory.mktemp("bin"), environment()) as folder:
        yield folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_run(page, tmp_path, forked):
    """Every block of Python and shell code of a page runs from top to bottom, in a folder with a training script."""
    if not any(
        block.language in {"python", "sh", "yaml", "json", "toml"} and not block.reason for block in blocks_of(page)
    ):
        return
    shutil.copytree(Path(__file__).parent / "files", tmp_path, dirs_exist_ok=True)
    variables = environment()
    if page.stem in FROM_NOTHING:
        command = [sys.executable, "-m", "page_blocks", str(page)]
    else:
        command = [str(forked / "page_blocks"), str(page)]
        variables["PATH"] = f"{forked}{os.pathsep}{variables['PATH']}"
    with GrpcReceiver() as receiver:
        variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://localhost:{receiver.port}"
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_say_what_they_are(page):
    """Every fence is part of a block, and every block has a language that is run, parsed or output; a block that is not run has a reason."""
    blocks = blocks_of(page)
    fences = len(re.findall(r"^ *```", page.read_text(), re.MULTILINE))
    assert fences == 2 * sum(block.language != "setup" for block in blocks)
    assert {block.language for block in blocks} <= LANGUAGES | {"setup"}
    assert not [block.line for block in blocks if block.reason and block.language not in {"python", "sh"}]
