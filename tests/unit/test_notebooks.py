"""What a notebook shows: HTML that is whole, bounded, and made of nothing but what was recorded."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

import otel_torchprof as otp
from otel_torchprof import markup
from otel_torchprof.health import QueueStats

HOSTILE = "</td><script>alert('x')</script>\"&\x1b[31m\u202e\udc80"
_VOID = {"br", "img"}


class Page(HTMLParser):
    """The elements and texts of a piece of HTML, which has to be whole."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.headings: list[dict[str, str | None]] = []
        self.numbers: list[list[float]] = []
        text.encode()  # a notebook sends it as UTF-8
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag in _VOID:
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.numbers.append([])
        elif tag in {"td", "th"}:
            self.rows[-1].append("")
            found = dict(attrs)
            self.headings += [found] if tag == "th" else []
            self.numbers[-1] += [float(found["data-v"])] if "data-v" in found else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in {"td", "th"}:
            self.rows[-1][-1] += data


@pytest.fixture
def recorded():
    """A profile of some labels, one of them with a name that nobody should trust; 300 names."""
    with otp.profile(operators=False) as prof:
        for number in range(300):
            with otp.record_function(f"label {number}"):
                pass
            if number % 100 == 0:
                with otp.record_function(HOSTILE):
                    pass
            prof.step()
    return prof


def test_averages(recorded):
    """A row for each of the first, those with the most self time first, with the text of the table and numbers to sort by."""
    averages = recorded.key_averages()
    page = Page(averages._repr_html_())
    head, *rows = page.rows
    assert head[:4] == ["Name", "Self CPU %", "Self CPU", "CPU total %"]
    assert len(rows) == 50
    assert [each["data-d"] for each in page.headings if "data-d" in each] == ["1"]
    times = [numbers[0] for numbers in page.numbers[1:]]
    assert times == sorted((each.self_cpu_time_total for each in averages), reverse=True)[:50]
    assert ">and 251 more<" in averages._repr_html_()
    assert len(averages._repr_html_()) < 50_000


def test_names_are_text(recorded):
    """A name with markup, control characters and half a surrogate pair is one cell and runs nothing."""
    for text in (recorded.key_averages().to_html(row_limit=-1), recorded._repr_html_(), recorded.spans()._repr_html_()):
        page = Page(text)
        assert "script" not in page.tags
        assert not {"\x1b", "\u202e"} & set(text)
    cells = [row[0] for row in Page(recorded.key_averages().to_html(row_limit=-1)).rows]
    assert cells.count("</td><script>alert('x')</script>\"&\\x1b[31m\\u202e\ufffd\ufffd\ufffd") == 1


def test_sorted_as_asked(recorded):
    """``to_html`` takes the sort keys of the table, and refuses others."""
    page = Page(recorded.key_averages().to_html("count", 1))
    assert [row[-1] for row in page.rows[1:]] == ["3"]
    with pytest.raises(ValueError, match="no attribute"):
        recorded.key_averages().to_html("nonsense")


def test_events_are_not_all_made(recorded):
    """A long list of events is shown from its begin, as HTML and as text, and the others are not made for that."""
    events = recorded.events()
    printed = []
    events._repr_pretty_(type("Printer", (), {"text": printed.append}), False)
    assert len(Page(events._repr_html_()).rows) == 51
    assert len(printed[0].splitlines()) < 60
    assert events._source.missing > 200


def test_a_profile(recorded):
    """Its summary has the figures, ten averages and the health; before its end it says that it has not ended."""
    text = recorded._repr_html_()
    page = Page(text)
    assert "profile of 303 events" in text
    assert "300 steps, median " in text
    assert len([row for row in page.rows if len(row) > 2]) == 11
    assert ["events dropped", "none"] in page.rows
    running = otp.profile(operators=False)
    assert "unfinished profile" in running._repr_html_()
    with running:
        assert "unfinished profile" in running._repr_html_()


def test_spans(recorded):
    """The first 50 spans with their times, ids and attributes."""
    page = Page(recorded.spans()._repr_html_())
    assert page.rows[0] == ["Name", "Start", "Duration", "Trace", "Span", "Parent", "Attributes"]
    assert len(page.rows) == 51
    assert len(page.rows[1][3]) == 8


def test_health():
    """What is on, off and dropped, of a profile, of a processor with an exporter's queue, and of GPUs."""
    stats = QueueStats(exported_spans=5, dropped={"queue_full": 2})
    health = otp.ProcessorHealth(
        sources={"operators": "on", "frames": f"off: {HOSTILE}"},
        recorded=1234,
        dropped={"evicted": 7},
        exporters={"OTLPExporter": stats},
        notes=("a <note>",),
    )
    text = health._repr_html_()
    rows = dict(Page(text).rows)
    assert rows["operators"] == "on"
    assert rows["frames"].startswith("off: </td><script>")
    assert (rows["events recorded"], rows["events dropped"]) == ("1,234", "7 (evicted)")
    assert "2 dropped (queue_full)" in rows["OTLPExporter"]
    assert "a &lt;note&gt;" in text
    gpus = otp.GpuHealth(sources={"nvml": "off: there is none"}, devices=(), notes=())
    assert dict(Page(gpus._repr_html_()).rows) == {"nvml": "off: there is none", "cards": "none"}
    with otp.profile(operators=False) as prof:
        pass
    assert dict(Page(prof.health._repr_html_()).rows)["labels"] == "on"


def test_looking_never_raises(recorded, monkeypatch):
    """Where the HTML fails there is none, and the notebook shows the text; empty lists are shown as such."""
    monkeypatch.setattr(markup, "block", lambda *_parts: 1 / 0)
    for value in (recorded, recorded.events(), recorded.key_averages(), recorded.spans(), recorded.health):
        assert value._repr_html_() is None
    monkeypatch.undo()
    assert "no events" in otp.EventList()._repr_html_()
    assert otp.profile(enabled=False)._repr_html_() is not None
