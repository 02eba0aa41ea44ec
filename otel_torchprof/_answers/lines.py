"""In which lines of the program a loop's thread was: which calls of a stack are its own code."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_torchprof._columns.samples import Call

# ---- calls of the program's own code ----

_LIBRARY = re.compile(
    r"[/\\](site-packages|dist-packages)[/\\]"
    r"|[/\\]lib(64)?[/\\]python\d(\.\d+t?)?[/\\]|[/\\]python\d+\.zip[/\\]"
    r"|[/\\]otel_torchprof[/\\](_\w+[/\\]|integrations[/\\]|\w+\.py)",
    re.IGNORECASE,
)
_OWN_CODE = ("<ipython-input", "<stdin>")
"""Begins of names of files that are cells of notebooks and lines of an interactive interpreter."""
_INSTALLED = (sysconfig.get_paths()["stdlib"] + os.sep, str(Path(__file__).resolve().parents[1]) + os.sep)
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


def is_own(file: str) -> bool:
    """Whether code is the program's own: not of the standard library, of an installed package, or made by ``exec``."""
    if not file or file.startswith("<"):
        return file.startswith(_OWN_CODE)
    if _LIBRARY.search(file) or file.startswith(_INSTALLED):
        return False
    first = re.split(r"[/\\]", file, maxsplit=1)[0]
    return first not in _PACKAGES and first.removesuffix(".py") not in sys.stdlib_module_names


def own_calls(stack: tuple[Call, ...]) -> list[Call]:
    """The calls of the program's own code, innermost first; of a program that is installed, those beside Python and torch."""
    own = [call for call in stack if is_own(call.file)]
    return own or [
        call for call in stack if not _OF_PYTHON_OR_TORCH.search(call.file) and not call.file.startswith("<")
    ]


_OF_PYTHON_OR_TORCH = re.compile(
    r"[/\\]lib(64)?[/\\]python\d(\.\d+t?)?[/\\](?!(site|dist)-packages)|(^|[/\\])(torch|otel_torchprof)[/\\]"
)
