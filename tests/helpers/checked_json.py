"""What commands print with ``--json``, checked with the schemas of the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas"


def checked(command: str, text: str) -> Any:
    """The value that a command printed, which is JSON without NaN and fits the schema of the command."""
    value = json.loads(text, parse_constant=_refused)
    Draft202012Validator(json.loads((SCHEMAS / f"{command}.json").read_text())).validate(value)
    return value


def _refused(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")
