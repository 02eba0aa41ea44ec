"""Words that this project once had for things for which the field has others."""

from __future__ import annotations

import re

_RETIRED = [
    r"t(?:ell|ells|old)\b.{0,20}? in detail",
    r"told of",
    r"detail (?:is|was) kept",
    r"kept or shrunk",
    r"held spans?",
    r"keepers?",
    r"composite spans?",
    r"folded (?:into|spans?)",
    r"giv(?:e|es|en) back",
    r"marks? of (?:a|the) device",
    r"stretch(?:es)?",
    r"wishes",
    r"own times?",
    r"surroundings",
    r"ambient",
    r"outermost",
    r"around each other",
    r"poisoned",
    r"go(?:es)? on",
    r"left on",
    r"percent of the time pays for",
    r"unproven",
]
"""Words of this project's own, for which the field has others: "reported", "surviving span", "freed", "segment", "self time", ..."""


def retired_in(text: str) -> list[str]:
    """The retired words of a text, whose lines may break anywhere."""
    found = re.compile(rf"\b(?:{'|'.join(_RETIRED)})\b", re.IGNORECASE)
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]
    return [word[0] for paragraph in paragraphs for word in found.finditer(paragraph)]
