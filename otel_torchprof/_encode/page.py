"""The page of a report: one HTML file with its data, its script and its style, which needs no network and allows none."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from otel_torchprof.errors import printable

_FOLDER = Path(__file__).parent / "report_page"
_SCRIPTS = ("drawing.js", "calls.js", "report.js")
"""Parts of one script, in their order."""
_LONGEST_TEXT = 400
"""Characters of a text; what comes after them is cut off, and the page says how much that is."""


def page(report: dict[str, Any]) -> bytes:
    """The file of a report, UTF-8.

    Texts of the report are data only: the script puts them into the page as text, and the Content-Security-Policy allows no
    other script and no connection.

    Args:
        report: a value for the json module, with arrays of numpy in it.
    """
    template, style, *scripts = (
        (_FOLDER / name).read_text("utf-8") for name in ("report.html", "report.css", *_SCRIPTS)
    )
    script = "\n".join(scripts)
    data = json.dumps(_plain(report), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "{{policy}}": f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'",
        "{{style}}": style,
        "{{data}}": data,
        "{{script}}": script,
    }
    pieces = [template]
    for mark, text in parts.items():  # in the order of the template: no mark is looked for in what was put in
        before, after = pieces.pop().split(mark)
        pieces += [before, text, after]
    return "".join(pieces).encode()


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _plain(value: Any) -> Any:
    """The value with lists for arrays, None for what is no number in JSON, and texts that are printable and not long."""
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT and value.isprintable() else _text(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _text(text: str) -> str:
    shown = printable(text[:_LONGEST_TEXT])
    return shown if len(text) <= _LONGEST_TEXT else f"{shown}... ({len(text) - _LONGEST_TEXT:,} more characters)"
