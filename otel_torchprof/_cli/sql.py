"""``otel-torchprof sql``: a query of the events of files, by DuckDB."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from decimal import Decimal
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any

from otel_torchprof._encode.arrow import TABLES
from otel_torchprof.errors import TorchProfError, package_of, printable

from .terminal import reading, say, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from otel_torchprof._profile.loaded import LoadedProfile

_LOCKED = {
    "enable_progress_bar": "false",  # which it prints on stdout
    "temp_directory": "''",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",  # names in a query are no variables of this program
    "enable_external_access": "false",
    "lock_configuration": "true",
}
"""Settings of DuckDB, in their order: the query reaches no file, no network and no extension, and prints nothing."""
_ALLOWED = ("SELECT", "EXPLAIN")
_WIDEST = 80


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "sql",
        help="query the events of files in SQL",
        description=f"Reads files as convert does, those of several ranks too, and runs a query of DuckDB over the tables {', '.join(TABLES)}: "
        "docs/columns.md lists their columns. Each has a column file, and rank. The query can read nothing else, and change nothing. "
        "Needs pip install 'otel-torchprof[sql]'. Exit status: 0 if the files were read completely, else 1.",
    )
    parser.add_argument("query", metavar="QUERY", help='such as "select name, sum(self) from events group by all"')
    parser.add_argument("files", metavar="FILE", nargs="+", help="trace file or black box")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a list of objects as JSON")
    form.add_argument("--csv", action="store_true", help="print CSV")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not show progress")


def run(options: argparse.Namespace) -> int:
    """Prints the result; returns 1 if a part of a file could not be read, else 0.

    Raises:
        TorchProfError: a file cannot be read, the query fails, or a package is missing.
    """
    names, rows, problems, is_partial = queried(options)
    for problem in problems:
        say(problem)
    if options.json:
        show(json.dumps(records(names, rows), indent=1, default=str) + "\n")
    else:
        show(_as_csv(names, rows) if options.csv else aligned(names, rows))
    return 1 if is_partial else 0


def queried(options: argparse.Namespace) -> tuple[list[str], list[tuple[Any, ...]], list[str], bool]:
    """The names of the result's columns, its rows, notes on the files, and whether a part of one could not be read.

    Raises:
        TorchProfError: as :func:`run`.
    """
    from otel_torchprof._profile.loaded import checked_limit, load_watched

    duckdb = package_of("sql", "duckdb", "sql")
    package_of("sql", "pyarrow", "sql")
    check(duckdb, options.query)
    limit = checked_limit(None) // len(options.files)
    tables: dict[str, list[Any]] = {name: [] for name in TABLES}
    notes, is_partial = [], False
    with reading(options.files, quiet=options.quiet) as watch:
        for path in options.files:
            prof = load_watched(path, max(limit, 1), partial(watch, path))
            for name, table in _tables_of(prof):
                tables[name].append(table)
            is_partial |= prof.is_partial
            notes += [f"{path!r}: {note}" for note in prof.health.notes]
    return *result_of(duckdb, options.query, tables), notes, is_partial


def records(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """The rows as objects for JSON."""
    return [dict(zip(names, map(_plain, row), strict=True)) for row in rows]


@contextlib.contextmanager
def _failing(duckdb: Any) -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        raise TorchProfError(f"the query failed: {error}") from error


def check(duckdb: Any, query: str) -> None:
    """Raises TorchProfError for a query that is not one statement that only reads."""
    with duckdb.connect(":memory:") as connection, _failing(duckdb):
        kinds = [statement.type.name for statement in connection.extract_statements(query)]
    if len(kinds) != 1 or kinds[0] not in _ALLOWED:
        raise TorchProfError(f"the query is {query!r}: it must be one statement that only reads, such as SELECT")


def result_of(duckdb: Any, query: str, tables: Mapping[str, Sequence[Any]]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The names of the columns of a query's result, and its rows; ``tables``: those of each file, by name.

    Raises:
        TorchProfError: the query fails.
    """
    arrow: Any = package_of("sql", "pyarrow", "sql")
    with duckdb.connect(":memory:") as connection:
        for name, of_files in tables.items():
            connection.register(name, arrow.concat_tables(of_files).unify_dictionaries())
        for setting, value in _LOCKED.items():
            connection.execute(f"set {setting} = {value}")
        with _failing(duckdb):
            connection.execute(query)
            return [column[0] for column in connection.description], connection.fetchall()


def _tables_of(prof: LoadedProfile) -> Iterator[tuple[str, Any]]:
    """Yields the name and the contents of each table of a file, with a column ``file``."""
    arrow: Any = package_of("sql", "pyarrow", "sql")
    path = arrow.array([prof.path.encode("utf-8", "replace").decode()])
    for name in TABLES:
        table = prof.to_arrow(name)
        files = arrow.DictionaryArray.from_arrays(arrow.repeat(arrow.scalar(0, arrow.int32()), len(table)), path)
        yield name, table.append_column("file", files)


def _plain(value: Any) -> Any:
    """A value for JSON, which has no decimals, and no numbers that are not finite."""
    value = float(value) if isinstance(value, Decimal) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue()


def aligned(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The rows as a table: numbers on the right, long texts cut."""
    cells = [[_cut("" if value is None else _text(value)) for value in row] for row in rows]
    titles = [printable(name) for name in names]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    is_number = [all(isinstance(row[at], Number | None) for row in rows) and bool(rows) for at in range(len(names))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in (titles, *cells)
    ]
    return "\n".join((*lines, ""))


def _text(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else printable(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
