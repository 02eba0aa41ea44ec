"""``otel-torchprof sql``: queries over the files of several ranks, and what a query cannot reach."""

from __future__ import annotations

import csv
import io
import sys

import pytest
from checked_json import checked
from opentelemetry.sdk.resources import Resource
from sql_queries import QUERIES
from table_files import NAMES, STEPS, rank_profile

import otel_torchprof as otp
from otel_torchprof._cli import main as cli

REASON = "tries queries of DuckDB"
pytest.importorskip("duckdb", reason=REASON)
pytest.importorskip("pyarrow", reason=REASON)


@pytest.fixture
def ranks(tmp_path):
    """Files of two ranks, in two formats."""
    paths = [tmp_path / "rank0.otlp.gz", tmp_path / "rank1.jsonl"]
    for rank, path in enumerate(paths):
        prof = rank_profile(rank)
        prof.export_as(path, resource=Resource({"torch.distributed.rank": rank}), detail="frames")
    return [str(path) for path in paths]


def answer(capsys, query, paths, *options):
    """The rows as objects."""
    capsys.readouterr()
    assert cli.main(["sql", "-q", "--json", *options, query, *paths]) == 0
    return checked("sql", capsys.readouterr().out)


def test_sums_by_rank_are_those_of_each_file(ranks, capsys):
    """Each file has its rank, its name and the sums of its averages."""
    query = "select file, rank, name, sum(count) as calls, sum(total) as total from events where name like 'a%' or name like 'c%' group by all"
    found = {
        (row["file"], row["rank"], row["name"]): (row["calls"], row["total"]) for row in answer(capsys, query, ranks)
    }
    expected = {}
    for rank, path in enumerate(ranks):
        for average in otp.load(path).key_averages():
            if average.key in {"aten::linear", "aten::addmm", "c10d::allreduce_"}:
                expected[path, rank, average.key] = (average.count, round(average.cpu_time_total * 1000))
    assert len(found) == 6
    assert found == expected


@pytest.mark.parametrize("title", QUERIES)
def test_queries_of_the_page(ranks, capsys, title):
    """Each query that docs/columns.md shows runs over the files of two ranks, and has an answer if they have what it asks for."""
    rows = answer(capsys, QUERIES[title], ranks)
    assert rows or title == "shapes of the most expensive operator"


def test_answers_of_the_page(ranks, capsys):
    """The answers are right: slowest steps, callers, the late rank, lines."""
    slowest = answer(capsys, QUERIES["slowest steps, and how much slower than the median"], ranks)
    assert [(row["step"], row["times"]) for row in slowest[:2]] == [(STEPS - 1, 1.8)] * 2
    more = answer(capsys, QUERIES["what slow steps have more of than others"], ranks)
    assert (more[0]["name"], more[0]["slow_ms"], more[0]["other_ms"]) == ("aten::addmm", 10.0, 2.0)
    caller = answer(capsys, QUERIES["what calls an operator"], ranks)
    assert [(row["name"], row["calls"], row["ms"]) for row in caller] == [
        ("aten::linear", 2 * STEPS, 2 * (2 * STEPS + 8.0))
    ]
    last = answer(capsys, QUERIES["the rank that comes last to collectives, by the clocks of the ranks"], ranks)
    assert [(row["rank"], row["times_last"]) for row in last] == [(1, STEPS), (0, 0)]
    lines = answer(capsys, QUERIES["lines of Python by sampled time"], ranks)
    assert {row["line"] for row in lines} == {"train.py:5 log", "train.py:9 load"}


def test_forms_of_output(ranks, capsys):
    """A table with numbers on the right, CSV, and JSON."""
    query = "select 'a,b' as text, 12 as number, null as nothing, 1.5 as part, '\x1b[2J' as bad union all select 'c', 3, null, 2, ''"
    assert cli.main(["sql", "-q", query, *ranks]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "text  number  nothing  part  bad",
        "a,b       12            1.5  \\x1b[2J",
        "c          3            2.0",
    ]
    assert cli.main(["sql", "-q", "--csv", query, *ranks]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[:2] == [["text", "number", "nothing", "part", "bad"], ["a,b", "12", "", "1.5", "\\x1b[2J"]]
    assert answer(capsys, "select 1.5 as part, 'nan'::double as none", ranks) == [{"part": 1.5, "none": None}]
    assert answer(capsys, "select start from steps limit 1", ranks)[0]["start"].startswith("20")


HIDDEN = "not for queries"


@pytest.mark.parametrize(
    "query",
    [
        "select * from '{}'",
        "select * from read_text('{}')",
        "select * from read_csv('{}')",
        "select * from read_blob('http://localhost:1/{}')",
        "select * from glob('{}')",
        "copy events to '{}'",
        "copy (select 1) to '{}'",
        "attach '{}'",
        "install httpfs",
        "load '{}'",
        "set enable_external_access = true",
        "pragma enable_profiling",
        "export database '{}'",
        "drop view events",
        "create table x as select 1",
        "select 1; select 2",
        "select * from ranks",
        "select * from profiles",
        "",
        "selekt",
    ],
)
def test_what_a_query_cannot_do(ranks, capsys, tmp_path, query):
    """A query reads no file, no network and no variable of the program, writes nothing, and changes no setting."""
    secret = tmp_path / "secret.csv"
    secret.write_text(HIDDEN)
    before = sorted(tmp_path.iterdir())
    assert cli.main(["sql", "-q", query.format(secret), *ranks[:1]]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "the query " in captured.err
    assert HIDDEN not in captured.err
    assert (secret.read_text(), sorted(tmp_path.iterdir())) == (HIDDEN, before)


def test_hostile_names(tmp_path, capsys):
    """Names with NUL, escapes and 10 kB are found and printed without effect; long ones are cut."""
    names = [*NAMES]
    names[3], names[4] = "a\0\x1b[31mb", "x" * 10_000
    rank_profile(0, names).export_as(tmp_path / "t.json")
    assert (
        cli.main(
            ["sql", "-q", "select name, sum(self) from events group by name order by name", str(tmp_path / "t.json")]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "a\\x00\\x1b[31mb" in printed
    assert max(map(len, printed.splitlines())) < 200
    found = answer(capsys, "select distinct name from events", [str(tmp_path / "t.json")])
    assert {row["name"] for row in found} >= {names[3], names[4]}


def test_a_damaged_file(tmp_path, capsys):
    """What can be read is queried, and the status says that it is not all."""
    rank_profile(0).export_as(tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    (tmp_path / "t.json").write_text(text[: len(text) * 3 // 4])
    assert cli.main(["sql", "-q", "select count(*) from events", str(tmp_path / "t.json")]) == 1
    captured = capsys.readouterr()
    assert int(captured.out.split()[-1]) > 0
    assert "t.json" in captured.err


def test_without_duckdb(monkeypatch, capsys, tmp_path):
    """Where DuckDB is missing the error says what to install, before files are read."""
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert cli.main(["sql", "select 1", str(tmp_path / "none.json")]) == 1
    assert "pip install 'otel-torchprof[sql]'" in capsys.readouterr().err
