"""The table of events or averages as HTML, for notebooks: the columns of the text table, sorted by a click."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from otel_torchprof.markup import Cell, Heading, table

from .table import attribute_of, columns_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .table import Column, Info, TableOptions


def html_table(
    info: Info, rows: Iterable[Any], options: TableOptions, *, total: int, row_limit: int, sort_by: str | None
) -> str:
    """The first rows of ``total``, in the order in which they come; a negative limit means no limit.

    ``sort_by`` is what they are sorted by, of which the heading tells.
    """
    columns = columns_of(info, options)
    by = next((each for each in reversed(columns) if sort_by and each.key == attribute_of(sort_by)), None)
    headings = [Heading(each.title, is_text=not each.key, is_sorted=each is by) for each in columns]
    displayed = rows if row_limit < 0 else itertools.islice(rows, row_limit)
    cells = ([_cell(column, event) for column in columns] for event in displayed)
    return table(headings, cells, hidden=0 if row_limit < 0 else total - row_limit)


def _cell(column: Column, event: Any) -> Cell:
    text = str(column.cell(event))
    number = getattr(event, column.key) or 0 if column.key else None
    return Cell(text, number, float(text[:-1]) / 100 if text.endswith("%") else None)
