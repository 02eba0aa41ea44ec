"""``%%torchprof`` in a shell of IPython."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import otel_torchprof as otp

pytest.importorskip("IPython", reason="the magic is one of IPython's")

CELL = "import otel_torchprof as otp\nfor number in range(3):\n    with otp.record_function('work'): pass\n"


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """One shell with the extension; IPython has one in a process."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config, ipython_dir=str(tmp_path_factory.mktemp("ipython")))
    shell.run_line_magic("load_ext", "otel_torchprof")
    yield shell
    InteractiveShell.clear_instance()


def displayed(shell, words: str, cell: str) -> tuple[bool, str, str]:
    """Whether the cell succeeded, what was displayed as HTML, and what was printed."""
    from IPython.utils.capture import capture_output

    with capture_output() as captured:
        result = shell.run_cell(f"%%torchprof {words}\n{cell}")
    html = "".join(output.data.get("text/html", "") for output in captured.outputs)
    return result.success, html, captured.stdout + captured.stderr


def test_a_cell(shell, tmp_path):
    """It runs in the notebook's namespace; its averages are shown, its trace is written, its profile is kept."""
    path = tmp_path / "t.json"
    success, html, _ = displayed(shell, f"-o {path} -p prof --sort count --rows 1", CELL)
    assert success
    assert shell.user_ns["number"] == 2
    assert html.count("<tr>") == 2
    assert [each.count for each in shell.user_ns["prof"].key_averages() if each.key == "work"] == [3]
    assert "work" in {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


TRAINING = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for batch in torch.utils.data.DataLoader(torch.randn(120, 8), batch_size=4):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("cell", "steps"), [(TRAINING, 30), ("for _ in range(20):\n    explained.step()\n", 20), ("pass\n", None)]
)
def test_steps_of_a_cell(shell, cell, steps):
    """The profile of a cell explains the steps of its training loop, or those that the cell marked; without any it says so."""
    if cell == TRAINING:
        pytest.importorskip("torch", reason="a training loop is torch's")
    assert displayed(shell, "-p explained", cell)[0]
    if (
        cell == TRAINING
    ):  # torch's mark of an optimizer that was made, by which later tests of this process would have steps
        sys.modules["torch"].optim.SGD.step.hooked = False
    prof = shell.user_ns["explained"]
    if steps is None:
        with pytest.raises(otp.TorchProfError, match="the profile has no steps"):
            prof.explain()
    else:
        assert f"{steps} steps" in str(prof.explain())


def test_a_cell_that_fails(shell):
    """Its error is shown, what ran before is in the table, and the cell counts as failed: a notebook that is executed stops."""
    success, html, said = displayed(shell, "", CELL + "1 / 0\n")
    assert not success
    assert "work" in html
    assert "ZeroDivisionError" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--sort nonsense", "invalid choice: 'nonsense'"),
        ("-p 1x", "--profile is '1x'; it must be a name for a variable"),
        ("-p class", "--profile is 'class'; it must be a name for a variable"),
        ("-o trace.txt", "--output is 'trace.txt'; its name must end in .json, "),
        ("--rows 'a", "No closing quotation"),
        ("-o no/such/folder.json", "create the folder first"),
    ],
)
def test_wrong_options(shell, words, why):
    """They are a usage error of the magic, without a traceback through this package."""
    success, _, said = displayed(shell, words, "pass")
    assert not success
    assert why in said
    assert "notebook.py" not in said


def test_ipython_is_imported_by_nothing_else():
    """Neither the package, nor a profile and what a notebook shows of it, imports IPython."""
    program = (
        "import sys, otel_torchprof as otp\n"
        "with otp.profile(operators=False) as prof:\n    pass\n"
        "prof._repr_html_(), prof.health._repr_html_(), otp.load_ipython_extension\n"
        "print('IPython' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert callable(otp.load_ipython_extension)
