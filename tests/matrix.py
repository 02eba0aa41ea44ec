"""Tries interpreters with releases of torch: `make matrix`, or `python tests/matrix.py 3.11+2.6.0 3.13+2.14.1`.

Each pair gets an environment in `build/matrix`, which stays: torch alone is a download of up to 3 GB the first time. Then a user's script
runs, with the wheel of `dist/` and without any compiler where there is one, and the parity tests, whose reference is that torch's own
profiler, and what `explain` says of that profiler's traces. Prints a table as Markdown, with versions and the date; fails where anything of a pair does.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "matrix"
REQUIREMENTS = ("package.txt", "without-torch.txt")
TESTS = (
    "parity",
    *(
        f"test_{name}.py"
        for name in (
            "frames_parity",
            "torch_differences",
            "imports",
            "schedules",
            "record_function_fast",
            "event_tree",
            "explained_programs",
        )
    ),
)
SCRIPT = """
import collections, sys, torch, otel_torchprof as otp
from torch.profiler import ProfilerActivity, profile as theirs
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())

def step():
    optimizer.zero_grad()
    with torch.profiler.record_function("loss"):
        loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()

for _ in range(3):
    step()
with theirs(activities=[ProfilerActivity.CPU], record_shapes=True) as expected:
    step()
with otp.profile(record_shapes=True) as found:
    step()
count = lambda prof: collections.Counter((event.name, str(event.input_shapes)) for event in prof.events())
assert count(found) == count(expected), count(found) - count(expected)
from otel_torchprof._native.torch_library import load
print(torch.__version__, len(found.events()), load().path.parent.name == "prebuilt")
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, in a folder that has no package to import."""
    return subprocess.run(
        command, cwd=OUT, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def python_of(pair: str) -> str:
    """The interpreter of the pair's environment, which is made the first time."""
    version, _, torch = pair.partition("+")
    folder = OUT / pair
    python = str(folder / "bin" / "python")
    if not (folder / "made").exists():
        files = (word for name in REQUIREMENTS for word in ("-r", str(ROOT / "requirements" / name)))
        for command in (
            (f"python{version}", "-m", "venv", "--clear", str(folder)),
            (python, "-m", "pip", "install", "--quiet", f"torch=={torch}"),
            (python, "-m", "pip", "install", "--quiet", *files, "transformers"),
        ):
            done = run(*command, PYENV_VERSION=version)
            if done.returncode != 0:
                raise SystemExit(f"{pair}: {' '.join(command)} failed:\n{done.stderr}")
        (folder / "made").touch()
    return python


def with_script(python: str, wheels: list[Path]) -> str:
    """How the user's script went: with the wheel, without a compiler and a folder to build in, or from the checkout."""
    if not wheels:
        done = run(python, "-c", SCRIPT, PYTHONPATH=str(ROOT))
    else:
        installed = run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheels[-1]))
        if installed.returncode != 0:
            return f"the wheel cannot be installed: {last(installed.stderr)}"
        nowhere = str(OUT / "nowhere")
        done = run(python, "-c", SCRIPT, PATH=nowhere, CXX="", OTEL_TORCHPROF_BUILD_DIR=nowhere, PYTHONPATH="")
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "otel-torchprof")
    if done.returncode != 0:
        return f"failed: {last(done.stderr)}"
    version, events, prebuilt = done.stdout.split()[-3:]
    way = "without a compiler" if prebuilt == "True" else "compiled here"
    return f"{version}: {events} events, all torch's; {way}"


def with_tests(python: str) -> str:
    """How the parity tests went; all that was said is kept beside the environment."""
    tests = [str(ROOT / "tests" / "torch" / name) for name in TESTS]
    options = ("-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT))
    done = run(python, "-m", "pytest", *options, *tests, PYTHONPATH=str(ROOT))
    Path(python).parents[1].joinpath("tests.log").write_text(done.stdout + done.stderr)
    return re.sub(r" in [\d.]+s.*", "", last(done.stdout)).strip("= ")


def last(text: str) -> str:
    """The last line."""
    return (text.strip().splitlines() or [""])[-1]


def main(pairs: list[str]) -> int:
    """Tries each pair, and prints its line when it is through; 1 where something of a pair failed."""
    is_bad = False
    OUT.mkdir(parents=True, exist_ok=True)
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    sys.stdout.write(f"{dt.datetime.now(tz=dt.timezone.utc):%Y-%m-%d}, {os.uname().machine}\n\n")
    sys.stdout.write("| Python | torch: a training step's events | parity tests |\n| --- | --- | --- |\n")
    for pair in pairs:
        python = python_of(pair)
        version = run(python, "-c", "import platform; print(platform.python_version())").stdout.strip()
        script, tests = with_script(python, wheels), with_tests(python)
        sys.stdout.write(f"| {version} | {script} | {tests} |\n")
        sys.stdout.flush()
        is_bad |= "all torch's" not in script or " passed" not in tests or "failed" in tests or "error" in tests
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
