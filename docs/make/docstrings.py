"""Turns what docstrings write for people into Markdown: an extension of griffe for the page of the API."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([^`]+)`")
_PAGE = re.compile(r"``docs/([a-z-]+\.md)(#[\w-]+)?``")


class Docstrings(griffe.Extension):
    """Links public names (``:class:`profile```) and pages (```docs/spans.md```)."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called when the whole package has been read."""
        self._public = {str(name) for name in pkg.exports or ()}
        self._rewrite(pkg)

    def _rewrite(self, parent: griffe.Module | griffe.Class) -> None:
        for member in (parent, *parent.members.values()):
            if member.is_alias:
                continue
            if member.docstring:
                member.docstring.value = self._markdown(member.docstring.value)
            if member is not parent and isinstance(member, griffe.Module | griffe.Class):
                self._rewrite(member)

    def _markdown(self, text: str) -> str:
        return _ROLE.sub(self._name, _PAGE.sub(r"[\1](\1\2)", text))

    def _name(self, role: re.Match[str]) -> str:
        name = role[1].removeprefix("otel_torchprof.")
        return f"[`{name}`][otel_torchprof.{name}]" if name in self._public else f"`{name}`"
