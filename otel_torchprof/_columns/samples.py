"""Samples of Python stacks: in which line a loop's thread was, some times a second; and which calls of a stack are the program's own."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .arrays import Flags, Integers


SAMPLES = "torch.samples"
"""Key of the attribute with the samples of a span."""
WAITS_FOR_LOCK = "<waits for GIL>"
"""Begin of the file of an innermost call that stands for a wait for the interpreter's lock: the rest is the line of the thread that has it."""
COMPREHENSIONS = frozenset(("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"))
"""Names of functions that are a part of the one that calls them."""
MOST_CALLS = 64
"""Calls of a stack that trace files have."""


class Call(NamedTuple):
    """A call in a stack, at the line that it has come to."""

    file: str
    """``co_filename`` of its code."""
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples as columns, a row each, ordered by time. Immutable."""

    time: Integers
    """Unix ns."""
    duration: Integers
    """The time that it stands for, ns: from the sample before it, at most some intervals."""
    thread: Integers
    """Index into ``Batch.threads``; of the events of a trace file, into their tracks."""
    stack: Integers
    """Index into :attr:`stacks`."""
    stacks: Sequence[tuple[Call, ...]]
    """The different stacks, each with the innermost call first. Those of a recorder grow meanwhile, and keep their indices."""

    def __len__(self) -> int:
        return len(self.time)

    def chosen(self, rows: Flags | Integers) -> Samples:
        """The samples of a mask, or of some rows in ascending order."""
        time, duration, thread, stack = (getattr(self, field.name)[rows] for field in fields(self)[:-1])
        return Samples(time, duration, thread, stack, self.stacks)

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples | None:
        """The samples of several, by time; those of the same ``stacks`` share them. None of none."""
        if not parts:
            return None
        stacks = parts[0].stacks
        columns = [np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)[:-1]]
        if any(part.stacks is not stacks for part in parts):
            firsts = np.cumsum([0, *(len(part.stacks) for part in parts[:-1])])
            columns[-1] = columns[-1] + np.repeat(firsts, [len(part) for part in parts])
            stacks = [stack for part in parts for stack in part.stacks]
        order = np.argsort(columns[0], kind="stable")
        time, duration, thread, stack = (column[order] for column in columns)
        return cls(time, duration, thread, stack, stacks)


# ---- calls of the program's own code ----

INSTALLED = re.compile(
    r"\A.*[/\\](site-packages|dist-packages|lib(64)?[/\\]python\d(\.\d+t?)?|python\d+\.zip)[/\\]",
    re.IGNORECASE | re.DOTALL,
)
"""The folder of Python's own modules, or of installed packages."""
_OURS_OR_LAUNCHER = re.compile(
    r"[/\\]otel_torchprof[/\\](_\w+[/\\]|integrations[/\\]|\w+\.py)"
    r"|(^|[/\\])(bin|scripts)[/\\]([^/\\]+(?<!\.py)|[^/\\]+\.exe[/\\]__main__\.py)\Z",
    re.IGNORECASE,
)
"""A module of this package, or a script with which pip starts an installed one: ``bin/torchrun``."""
_OWN_CODE = ("<ipython-input", "<stdin>")
"""Begins of names of files that are cells of notebooks and lines of an interactive interpreter."""
_FOLDERS = (sysconfig.get_paths()["stdlib"] + os.sep, str(Path(__file__).resolve().parents[1]) + os.sep)
_PACKAGES = frozenset(
    (
        *(
            "accelerate",
            "cv2",
            "datasets",
            "diffusers",
            "huggingface_hub",
            "ignite",
            "joblib",
            "lightning",
            "lightning_fabric",
        ),
        *(
            "matplotlib",
            "mlflow",
            "numpy",
            "pandas",
            "PIL",
            "pytorch_lightning",
            "safetensors",
            "scipy",
            "sklearn",
            "tensorboard",
        ),
        *("timm", "tokenizers", "torch", "torchaudio", "torchmetrics", "torchvision", "tqdm", "transformers", "wandb"),
    )
)
"""Packages whose calls some traces name without the folder that they are in."""


@lru_cache(maxsize=4096)
def is_own(file: str) -> bool:
    """Whether code is the program's own: not of Python, of an installed package, what starts one, or made by ``exec``."""
    if not file or file.startswith("<"):
        return file.startswith(_OWN_CODE)
    if INSTALLED.match(file) or _OURS_OR_LAUNCHER.search(file) or file.startswith(_FOLDERS):
        return False
    first = re.split(r"[/\\]", file, maxsplit=1)[0]
    return first not in _PACKAGES and first.removesuffix(".py") not in sys.stdlib_module_names


def kept_calls(stack: tuple[Call, ...], most: int = MOST_CALLS) -> tuple[Call, ...]:
    """The innermost calls of a stack with more than ``most``, and a quarter around them.

    Half of these are the nearest of the program's own code, which may have called a compiler; the others are the outermost.
    """
    if len(stack) <= most:
        return stack
    inner, around = most - most // 4, range(most - most // 4, len(stack))
    own = [place for place in around if is_own(stack[place].file)][: most // 8]
    outer = [place for place in around[::-1] if place not in own][: most // 4 - len(own)]
    return (*stack[:inner], *(stack[place] for place in sorted((*own, *outer))))
