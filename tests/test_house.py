"""Habits of the house that a machine can check."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import generated
import numpy as np
import pytest
import tomllib
from sql_queries import QUERIES

import otel_torchprof as otp
from otel_torchprof import config
from otel_torchprof._columns.schema import (
    COLLECTIVE_COLUMNS,
    COLUMNS,
    DEVICE_COLUMNS,
    ENERGY_COLUMNS,
    MEMORY_COLUMNS,
    OPTIONAL,
    REDUCTION_COLUMNS,
    WORK_COLUMNS,
    CollectiveFlag,
    Column,
    Flag,
    Kind,
    MemoryFlag,
    WorkFlag,
)
from otel_torchprof._encode.arrow import TABLES
from otel_torchprof._encode.attributes import attributes_markdown
from otel_torchprof._export.unknown_variables import standard_variables_markdown
from otel_torchprof._instrument.gpu_metrics import gpu_metrics_markdown
from otel_torchprof._native import build

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("otel_torchprof", "native", "tests", "benchmarks", "examples")
SOURCES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".cc", ".h", ".js"}
)
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
MOST_LINES = 700
MOST_LINES_OF_A_FUNCTION = 60


def name(path: Path) -> str:
    """The path as one would type it."""
    return path.relative_to(ROOT).as_posix()


def test_files_are_short():
    """A source file has one topic, of at most 700 lines; one that has fewer is not cut to be short."""
    assert [name(path) for path in SOURCES if len(path.read_text().splitlines()) > MOST_LINES] == []


def test_functions_fit_on_a_screen():
    """No function of the package is longer, with its docstring; without its signature, of which torch has long ones."""
    functions = [
        (f"{name(path)}: {node.name}", (node.end_lineno or 0) - node.body[0].lineno + 1)
        for path in (ROOT / "otel_torchprof").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [function for function in functions if function[1] > MOST_LINES_OF_A_FUNCTION] == []


def test_a_class_name_has_one_meaning():
    """No two classes of the package have one name, but for the two of torch's own whose names ours are."""
    found = [
        node.name
        for path in (ROOT / "otel_torchprof").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name, count in Counter(found).items() if count > 1} == {"profile"}


def test_nothing_is_left_for_later():
    """Unfinished work is an issue, not a comment."""
    left = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]))
    assert [(name(path), line) for path in SOURCES for line in path.read_text().splitlines() if left.search(line)] == []


def test_every_test_says_what_it_proves():
    """Each test function has a docstring."""
    assert [
        (name(path), node.name)
        for path in TESTS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ] == []


@pytest.mark.parametrize("cdef", build.CDEFS, ids=lambda path: path.stem)
def test_cdef_agrees_with_the_headers(cdef):
    """What cffi is told is what the C headers declare; refresh it with `python otel_torchprof/_native/build.py`."""
    assert cdef.read_text() == build.CDEFS[cdef]()


def test_every_declaration_is_made_from_a_header():
    """No module tells cffi, or ctypes, of this package's C in its own words; that none outside of `_native` does, test_layers proves."""
    reported = re.compile(r"\bcdef\((?!CDEF\.read_text\(\)\))|\bargtypes = \[ctypes|\brestype = ctypes")
    sources = (ROOT / "otel_torchprof" / "_native").glob("*.py")
    assert [name(path) for path in sources if reported.search(path.read_text())] == []


def test_requirements_are_pinned():
    """Every requirement names one version, so that a fresh environment is the tested one."""
    pin = re.compile(r"[\w.-]+==[\w.+]+(; python_version (<|>=) \"3\.\d+\")?")
    for path in (ROOT / "requirements").glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith(("#", "-r "))]
        assert lines, name(path)
        assert [line for line in lines if not pin.fullmatch(line)] == [], name(path)


def test_entry_points_are_there():
    """What pyproject.toml tells pip and OpenTelemetry to load can be loaded."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    targets = [target.partition(":") for group in groups for target in group.values()]
    assert len(targets) > 3
    assert all(callable(getattr(importlib.import_module(module), name)) for module, _, name in targets)


def test_promised_interpreters_are_tested():
    """Every version that the package's metadata names, from the lowest that it allows on, is one that `make test-all` looks for."""
    project = (ROOT / "pyproject.toml").read_text()
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    tested = re.findall(r"^INTERPRETERS \?= (.+)$", (ROOT / "tests" / "Makefile").read_text(), re.MULTILINE)
    assert promised == tested[0].split()[: len(promised)]
    assert re.findall(r'^requires-python = "(.+)"$', project, re.MULTILINE) == [f">={promised[0]}"]


def test_workflows_run_what_is_here():
    """Each command of the workflows is a target of the Makefile or a script of the repository, and a push runs all that has to pass."""
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    texts = {path.stem: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    commands = {
        name: re.findall(r"^ *- (?:run: )?((?:make|\.ci/)\S* ?\S*)", text, re.MULTILINE) for name, text in texts.items()
    }
    assert commands["checks"] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    made = [command.split()[1] for name, found in commands.items() if name != "checks" for command in found]
    assert len(made) > 5
    assert set(made) <= set(targets)


def column_page() -> str:
    """The page that lists the columns, made from their one table."""

    def table(columns: Iterable[Column]) -> list[str]:
        rows = (f"| `{column.name}` | {column.dtype} | {column.unit} | {column.meaning} |" for column in columns)
        return ["", "| column | dtype | unit | meaning |", "| --- | --- | --- | --- |", *rows, ""]

    def members(title: str, enum: type[Kind | Flag | MemoryFlag | WorkFlag | CollectiveFlag]) -> list[str]:
        return [f"{title}: {', '.join(f'{member.name} {int(member)}' for member in enum)}.", ""]

    return "\n".join(
        [
            "# Columns",
            "",
            "`prof.columns` has all events as numpy arrays, one row per event. Rows are grouped by thread and, within a thread,",
            "sorted by start time. This page is generated from `otel_torchprof/_columns/schema.py` by",
            "`make generated`.",
            *table((*COLUMNS, *OPTIONAL)),
            *members("Kinds", Kind),
            *members("Flags", Flag),
            "`prof.memory` has one row per allocation and release, with `profile_memory`, grouped by thread and, within a thread,",
            "sorted by time.",
            *table(MEMORY_COLUMNS),
            *members("Flags", MemoryFlag),
            "`prof.devices` has the device times: one row per event with timing events, in no order",
            "([measurements.md](measurements.md#device-time)).",
            *table(DEVICE_COLUMNS),
            "`prof.work` has the kernels, copies and other work of devices of a [trace of torch's profiler](profile.md#read-a-trace-file-otpload),",
            "grouped by track and, within a track, sorted by start.",
            *table(WORK_COLUMNS),
            *members("Flags", WorkFlag),
            "`prof.energy` has the readings of energy counters, in no order ([measurements.md](measurements.md#energy)).",
            *table(ENERGY_COLUMNS),
            "`prof.samples` has samples of Python stacks, by time, as attributes; `chosen(rows)` takes some of them. `stacks[stack]` is a stack of",
            "calls, each with `file`, `line` and `function`, the innermost first. One whose file begins with `<waits for GIL>` stands for a wait for",
            "Python's lock: the rest is the line of the thread that has it.",
            *table(
                (
                    Column("time", np.dtype(np.int64), "ns", "time of the sample, Unix time"),
                    Column("duration", np.dtype(np.int64), "ns", "the time that it stands for"),
                    Column("thread", np.dtype(np.int64), "", "index into Batch.threads"),
                    Column("stack", np.dtype(np.int64), "", "index into stacks"),
                )
            ),
            "`prof.collectives` has one row per collective, send and receive of `torch.distributed`, in no order",
            "([ranks.md](ranks.md#read-collectives-group-number-size)).",
            *table(COLLECTIVE_COLUMNS),
            *members("Flags", CollectiveFlag),
            "`reductions` of a [loaded profile](profile.md#read-a-trace-file-otpload) has what events of a",
            "[reduced trace](spans.md#trace-size) stand for: one row per event that was aggregated, and per event or span that others were",
            "collapsed into, in no order.",
            *table(REDUCTION_COLUMNS),
            *arrow_section(),
        ]
    )


def arrow_section() -> list[str]:
    """What the page says of tables of Arrow, and the queries of these."""

    def fields(name: str) -> list[str]:
        rows = (f"| `{field.name}` | {field.type} | {field.unit} | {field.meaning} |" for field in TABLES[name])
        return [f"### Table `{name}`", "", "| column | type | unit | meaning |", "| --- | --- | --- | --- |", *rows, ""]

    queries = [line for title, query in QUERIES.items() for line in (f"-- {title}", *f"{query};".splitlines(), "")]
    return [
        "## Arrow, Parquet and SQL",
        "",
        "`prof.to_arrow()` returns the table `events` (`pip install 'otel-torchprof[arrow]'`), `prof.to_arrow(\"steps\")` another one;",
        '`prof.export_as("events.parquet")` writes it. `otel-torchprof sql QUERY FILE...` (`[sql]`) queries all of them by DuckDB, of many',
        "files at once: each has a column `file`, and a query reads nothing else. The rows of `events` are those of `key_averages()`, and",
        "modules. A recording that lacks something has nulls.",
        "",
        *(line for name in TABLES for line in fields(name)),
        "### Queries",
        "",
        "```sql",
        *queries[:-1],
        "```",
        "",
    ]


def test_column_page_is_up_to_date():
    """docs/columns.md says what the schema says."""
    generated.check(ROOT / "docs" / "columns.md", column_page())


def own_options_markdown() -> str:
    """The table of this package's own options."""
    rows = []
    for option in config.OPTIONS:
        part = f": `{option.key}=`" if option.key else ""
        names = (
            f"`{option.variable}`{part}" if option.variable else "",
            option.argument,
            option.flag.partition(" ")[0],
        )
        cells = [name if name.startswith("`") or not name else f"`{name}`" for name in names]
        rows.append(f"| {' | '.join([*cells, option.displayed_default, option.meaning])} |")
    return "\n".join(
        [
            "",
            "## Variables of this package",
            "",
            "Some variables have parts, separated by commas: `OTEL_TORCHPROF_POLICY=every=10,keep=slow`,",
            "`OTEL_TORCHPROF_CHROME_TRACE=trace.json,max_files=5`. An invalid or unknown part is ignored with one warning; the other",
            "parts apply.",
            "",
            "An argument is one of `instrument()`, `profile()`, `stream()` or an exporter; with `OTEL_TORCHPROF_POLICY` of `SpanPolicy`, with",
            "`OTEL_TORCHPROF_FRAMES` of `FrameFilter`. A flag is one of `otel-torchprof run`.",
            "",
            "| Variable | Argument | Flag | Default | Meaning |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def options_docstring() -> str:
    """The options of ``instrument()`` as its docstring lists them."""
    entries = []
    for option in config.arguments_in(config.InstrumentOptions):
        part = f"`{option.key}=` of " if option.key else ""
        variable = f"{part}`{option.variable}`, else " if option.variable else ""
        text = f"`{option.argument}`: {option.help}. Default: {variable}{option.displayed_default}."
        entries.append(textwrap.fill(text.replace("`", "``"), 120, initial_indent="    - ", subsequent_indent="      "))
    return "\n".join(entries)


def test_the_docstring_of_the_instrumentor_is_up_to_date():
    """It lists the options of ``instrument()`` as the table has them."""
    path = ROOT / "otel_torchprof" / "_instrument" / "instrumentor.py"
    head, found, rest = path.read_text().partition("    - ``detail``:")
    expected = f"{head}{options_docstring()}\n\n{rest.partition(f'{chr(10)}{chr(10)}')[2]}"
    assert found
    generated.check(path, expected)


@pytest.mark.parametrize(("kind", "variable"), [(otp.SpanPolicy, config.POLICY), (otp.FrameFilter, config.FRAMES)])
def test_fields_are_options(kind, variable):
    """The fields of a class that a variable sets are those of the table, and its docstring describes each."""
    names = {field.name for field in dataclasses.fields(kind) if field.init} - {"schedule"}
    assert names == set(config.fields_in(variable))
    assert [name for name in names if f"\n        {name}: " not in kind.__doc__] == []


def test_every_variable_of_ours_is_in_the_table():
    """A variable that is named anywhere in the package is one that config.py has; they are few."""
    name = re.compile(r"OTEL_TORCHPROF_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_*])")
    sources = [path.read_text() for path in (ROOT / "otel_torchprof").rglob("*.py")]
    variables = {option.variable for option in config.OPTIONS if option.variable}
    assert {found for source in sources for found in name.findall(source)} == variables
    assert len(variables) <= 22


@pytest.mark.parametrize(
    ("page", "marker", "table"),
    [
        ("spans.md", "attributes", attributes_markdown),
        ("settings.md", "variables", lambda: standard_variables_markdown() + own_options_markdown()),
        ("metrics.md", "gpu metrics", gpu_metrics_markdown),
    ],
)
def test_tables_of_the_docs_are_up_to_date(page, marker, table):
    """The last section of these pages is the table that the code has."""
    path = ROOT / "docs" / page
    head, mark, _ = path.read_text().partition(f"<!-- {marker} -->\n")
    assert mark
    generated.check(path, f"{head}{mark}\n{table()}")


def test_a_version_is_the_same_everywhere():
    """What a release changes by hand agrees: the package, its citation, the supported version, the newest release of the changelog."""
    version = otp.__version__
    changelog = re.findall(r"^## \[(\d[^]]*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    assert changelog[0][0] == version
    assert f'version: {version}\ndate-released: "{changelog[0][1]}"' in citation
    assert f"{version.rpartition('.')[0]}.x is supported" in (ROOT / "SECURITY.md").read_text()


def test_a_wheel_has_every_package():
    """Each folder of modules is a package in pyproject.toml: an installation in place would not miss one, a wheel would."""
    listed = re.findall(r'^  "(otel_torchprof[\w.]*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "otel_torchprof").rglob("*.py")}
    built = {"otel_torchprof._native.sources", "otel_torchprof.docs"}
    assert {".".join(folder.parts) for folder in folders} == set(listed) - built


def test_pages_that_the_package_names_exist():
    """Every page that a docstring or a message names is one that a wheel brings."""
    named = {
        page
        for path in (ROOT / "otel_torchprof").rglob("*.py")
        for page in re.findall(r"(?<![\w/.])docs/([\w-]+\.md)", path.read_text())
    }
    assert named
    assert not [page for page in named if not (ROOT / "docs" / page).exists()]
