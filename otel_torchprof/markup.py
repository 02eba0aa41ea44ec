"""HTML for notebooks: self-contained tables and summaries that use the page's colours and escape every text."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_LONGEST_TEXT = 300
"""Most characters of a cell."""
_STYLE = (
    "<style>"
    ".otel-torchprof{overflow-x:auto}"
    ".otel-torchprof table{border-collapse:collapse;font-size:90%;margin:.3em 0}"
    ".otel-torchprof th,.otel-torchprof td{border:0;border-bottom:1px solid rgba(128,128,128,.3);padding:.15em .7em;"
    "text-align:right;vertical-align:top;white-space:nowrap;font-variant-numeric:tabular-nums}"
    ".otel-torchprof .text{text-align:left!important;max-width:34em;overflow:hidden;text-overflow:ellipsis;unicode-bidi:isolate}"
    ".otel-torchprof td.wrapped{white-space:normal;max-width:60em}"
    ".otel-torchprof .sortable th{cursor:pointer}"
    '.otel-torchprof th[data-d="1"]::after{content:" \\25be"}'
    '.otel-torchprof th[data-d="-1"]::after{content:" \\25b4"}'
    ".otel-torchprof summary{cursor:pointer}"
    "</style>"
)
# A handler in an attribute, since not every notebook runs scripts of an output. Sorts numbers from the largest on and texts
# alphabetically; a second click reverses the order.
_SORT = (
    "var h=event.target.closest('th');if(h){var b=h.closest('table').tBodies[0],i=h.cellIndex,"
    "k=function(r){var c=r.cells[i];return 'v' in c.dataset?-c.dataset.v:c.textContent},"
    "d=-(h.dataset.d||-1);Array.from(h.parentNode.cells).forEach(function(c){delete c.dataset.d});h.dataset.d=d;"
    "Array.from(b.rows).sort(function(x,y){var p=k(x),q=k(y);return d*(p<q?-1:p>q?1:0)})"
    ".forEach(function(r){b.appendChild(r)})}"
)


class Cell(NamedTuple):
    """A table cell."""

    text: str
    number: float | None = None
    """Sort key; None: the text."""
    share: float | None = None
    """Length of a bar behind the text, between 0 and 1."""


class Heading(NamedTuple):
    """The heading of a column."""

    text: str
    is_text: bool = False
    """Whether the column is aligned left; numbers are aligned right."""
    is_sorted: bool = False
    """Whether the rows are sorted by it, the largest first."""


def attempt(make: Callable[[], str]) -> str | None:
    """Returns the result of a function; None if it raises, so that the notebook displays the text instead."""
    try:
        return make()
    except Exception:  # noqa: BLE001 - the text is displayed instead
        return None


def block(*parts: str) -> str:
    """Joins pieces of HTML to one output."""
    return f'<div class="otel-torchprof">{_STYLE}{"".join(parts)}</div>'


def escaped(text: object) -> str:
    """Escapes a text of any origin, shortens it if it is long, and replaces characters that are not printable."""
    from html import escape  # imports a large table of character names, which only notebooks need

    shown = str(text)
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)
    return escape(shown if len(shown) <= _LONGEST_TEXT else shown[:_LONGEST_TEXT] + "...")


def line(text: object) -> str:
    """Returns a line of text as HTML."""
    return f"<div>{escaped(text)}</div>"


def details(title: str, body: str, *, is_open: bool = False) -> str:
    """Returns HTML that is collapsed below a title."""
    return f"<details{' open' if is_open else ''}><summary>{escaped(title)}</summary>{body}</details>"


def table(headings: Sequence[Heading], rows: Iterable[Sequence[Cell]], *, hidden: int = 0) -> str:
    """Returns a table that sorts by a clicked heading; ``hidden`` is the number of further rows."""
    head = "".join(map(_heading, headings))
    body = "".join(f"<tr>{''.join(map(_cell, row, headings))}</tr>" for row in rows)
    more = line(f"and {hidden:,} more") if hidden > 0 else ""
    handler = _SORT.replace("&", "&amp;")  # it has no double quotes
    return (
        f'<table class="sortable"><thead onclick="{handler}"><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}'
    )


def pairs(rows: Iterable[tuple[str, object]]) -> str:
    """Returns a table of names and values."""
    cells = "".join(
        f'<tr><th class="text">{escaped(name)}</th><td class="text wrapped">{escaped(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table><tbody>{cells}</tbody></table>"


def _heading(heading: Heading) -> str:
    kind = ' class="text"' if heading.is_text else ""
    order = ' data-d="1"' if heading.is_sorted else ""
    return f'<th{kind}{order} title="click to sort">{escaped(heading.text)}</th>'


def _cell(cell: Cell, heading: Heading) -> str:
    kind = ' class="text"' if heading.is_text else ""
    number = "" if cell.number is None else f' data-v="{cell.number:.17g}"'
    bar = ""
    if cell.share is not None:
        end = f"{100 * min(max(cell.share, 0.0), 1.0):.1f}%"
        bar = f' style="background:linear-gradient(90deg,rgba(66,133,244,.3) {end},transparent {end})"'
    text = escaped(cell.text)
    title = f' title="{text}"' if heading.is_text else ""
    return f"<td{kind}{number}{bar}{title}>{text}</td>"
