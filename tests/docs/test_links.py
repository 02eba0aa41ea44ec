"""Links, navigation, length and words of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from retired_words import retired_in

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *DOCS,
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
GENERATED = {"api", "columns", "command-line", "names", "torch-names"}
"""Pages that are made from the code."""
MOST_PAGES = 19
MOST_WORDS = 18_000
MOST_README_LINES = 150
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
_HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)
_TABLES = re.compile(r"^<!-- (?:attributes|causes|variables|gpu metrics) -->$.*", re.MULTILINE | re.DOTALL)
_MESSAGES = re.compile(r"^## What wrong setups say$.*?(?=^##? |\Z)", re.MULTILINE | re.DOTALL)
_NAMED_PAGE = re.compile(r"\bdocs/([a-z-]+\.md)(?:#([\w-]+))?")


def name(path: Path) -> str:
    """The path as one would type it."""
    return path.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """What links to parts of a page may say: its headings, as GitHub names them, and the names of an API page."""
    found: list[str] = []
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(slug)}(?:-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{count}" if slug in found else slug)
    return {*found, *re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}


def broken(page: Path) -> list[str]:
    """Links of a page to files and headings that do not exist."""
    found = []
    for link in _LINK.findall(prose(page)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        linked = (page.parent / target).resolve() if target else page
        if not linked.exists() or (anchor and linked.suffix == ".md" and anchor not in anchors(linked)):
            found.append(link)
    return found


def words(page: Path) -> int:
    """Words of prose: without code blocks, comments, tables that are made from the code, and messages of the program."""
    text = _TABLES.sub("", prose(page))
    text = _MESSAGES.sub(lambda found: re.sub(r"^\|.*$", "", found[0], flags=re.MULTILINE), text)
    return len(_COMMENT.sub("", text).split())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    """Every relative link goes to a file that exists, and to a heading of it."""
    assert broken(page) == []


def test_anchors_are_those_of_github(tmp_path):
    """Punctuation goes, each space becomes a hyphen, a repeated heading gets a number."""
    page = tmp_path / "page.md"
    page.write_text("# `run_it`: a / b\n## [Text](x.md)!\n### Again\n### Again\n```sh\n# no heading\n```\n")
    assert anchors(page) == {"run_it-a--b", "text", "again", "again-1"}


def test_every_page_is_in_the_navigation():
    """The navigation of the site has each page of docs/ once, and no other."""
    navigation = re.findall(r"^ +- .+: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == [page.name for page in DOCS]


def test_pages_that_the_code_names_exist():
    """A page, or a part of one, that a docstring or a message refers to is there."""
    wrong = [
        (name(module), found[0])
        for module in sorted((ROOT / "otel_torchprof").rglob("*.py"))
        for found in _NAMED_PAGE.finditer(module.read_text())
        if not (page := ROOT / "docs" / found[1]).exists() or (found[2] and found[2] not in anchors(page))
    ]
    assert wrong == []


def test_pages_are_few_and_short():
    """The hand-written pages can be read in an evening."""
    counts = {page.stem: words(page) for page in DOCS if page.stem not in GENERATED}
    assert len(counts) <= MOST_PAGES
    assert sum(counts.values()) < MOST_WORDS, counts


def test_readme_is_short():
    """The README fits into three screens."""
    assert len((ROOT / "README.md").read_text().splitlines()) < MOST_README_LINES


@pytest.mark.parametrize("page", [*DOCS, ROOT / "README.md"], ids=name)
def test_words_are_those_of_the_field(page):
    """No page has a word that readers of PyTorch and OpenTelemetry would have to learn here."""
    text = _COMMENT.sub("", re.sub(r"`[^`\n]*`", "", prose(page)))
    assert retired_in(text) == []
