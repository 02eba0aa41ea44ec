"""The page of a report in a real browser: search, zoom, sort, keys, a phone, a dark page, and hostile names."""

from __future__ import annotations

import json

import pytest
import torch
from browser import CHROMIUM, Browser
from explained_files import kineto, piece, served

import otel_torchprof as otp
from otel_torchprof._cli import main as cli

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome in PATH")
HOSTILE = (
    '</script><script>document.title="changed"</script><img src=http://127.0.0.1:9/x onerror=document.title="changed">'
)


@pytest.fixture
def opened(tmp_path):
    """A browser with the page of a trace: a hostile operator, and one with two others inside."""

    def inside(begin):
        call = piece("aten::linear", begin + 1, 5), piece("aten::mm", begin + 2, 3), piece("aten::t", begin + 5.2, 0.5)
        return [*call, piece(HOSTILE, begin + 7, 2)]

    file = kineto(tmp_path / "t.json", 30, inside)
    assert cli.main(["report", str(file), "-o", str(tmp_path / "r.html"), "-q"]) == 0
    browsers = []

    def make(**options):
        browsers.append(Browser(tmp_path / f"browser{len(browsers)}", **options))
        browsers[-1].open(tmp_path / "r.html")
        return browsers[-1]

    yield make
    for browser in browsers:
        browser.close()


def text(browser, selector):
    """The text of an element."""
    return browser.value(f"document.querySelector({json.dumps(selector)}).textContent").replace("\u203a", ">")


def type_into(browser, selector, words):
    """Types into an input."""
    browser.value(
        f"(() => {{ const input = document.querySelector({json.dumps(selector)}); input.value = {json.dumps(words)};"
        "input.dispatchEvent(new Event('input')); })()"
    )


def names(browser):
    """The first column of the table."""
    return browser.value("[...document.querySelectorAll('#table tbody tr')].map((row) => row.cells[0].textContent)")


def test_search_zoom_and_keys(opened):
    """A search says what the names take, and counts nothing twice; a click, and keys, zoom in and out."""
    browser = opened()
    type_into(browser, "#calls input", "aten::")
    assert text(browser, "#calls output") == "3 names, 150.0 ms, 71.4 %"
    type_into(browser, "#calls input", "MM")
    assert text(browser, "#calls output") == "1 name, 90.00 ms, 42.9 %"
    type_into(browser, "#calls input", "")
    assert text(browser, "#calls output") == ""
    assert text(browser, "#calls .crumbs") == "All: 210.0 ms"
    browser.value("document.querySelector('#calls canvas').scrollIntoView({ behavior: 'instant', block: 'center' })")
    x, y = browser.value(
        "(({ left, top }) => [left, top])(document.querySelector('#calls canvas').getBoundingClientRect())"
    )
    browser.click(x + 20, y + 33)
    assert text(browser, "#calls .crumbs") == "All: 210.0 ms>aten::linear>aten::mm90.00 ms, 42.9 %"
    browser.value("document.querySelector('#calls canvas').focus()")
    for _ in range(2):
        browser.key("Escape")
    assert text(browser, "#calls .crumbs") == "All: 210.0 ms"
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        browser.key(key)
    assert text(browser, "#calls .crumbs").endswith("aten::linear>aten::t15.00 ms, 7.1 %")
    assert text(browser, "#calls .detail").startswith("aten::t time 15.00 ms, 7.1 %; itself 15.00 ms · calls 30")
    browser.value(
        "(() => { const order = document.querySelectorAll('#calls select')[1]; order.selectedIndex = 1; order.dispatchEvent(new Event('change')); })()"
    )
    type_into(browser, "#calls input", "aten::linear")
    assert text(browser, "#calls output") == "1 name, 150.0 ms, 71.4 %"
    assert text(browser, "#calls .crumbs") == "All: 210.0 ms"
    assert (browser.messages, [url for url in browser.requests if not url.startswith("file:")]) == ([], [])


def test_sort_and_filter(opened):
    """Headings sort, and reverse; the filter keeps matching rows; a name leads to the calls."""
    browser = opened()
    assert [name[:10] for name in names(browser)] == ["aten::mm", HOSTILE[:10], "aten::line", "aten::t"]
    heading = (
        "[...document.querySelectorAll('#table th button')].find((each) => each.textContent.startsWith('{}')).click()"
    )
    browser.value(heading.format("Total"))
    assert names(browser)[0] == "aten::linear"
    browser.value(heading.format("Total"))
    assert names(browser)[0] == "aten::t"
    assert browser.value("document.querySelector('#table th[aria-sort]').getAttribute('aria-sort')") == "ascending"
    browser.value(heading.format("Name"))
    assert names(browser)[1:] == ["aten::linear", "aten::mm", "aten::t"]
    type_into(browser, "#table input", "mm")
    assert (names(browser), text(browser, "#table output")) == (["aten::mm"], "1 row")
    browser.value("document.querySelector('#table tbody button').click()")
    assert browser.value("document.querySelector('#calls input').value") == "aten::mm"


def test_names_are_text(opened):
    """A name with elements and handlers is displayed as it is: nothing of it runs, and nothing is requested."""
    browser = opened()
    assert HOSTILE in names(browser)
    found = "[document.title, document.querySelectorAll('img').length, document.querySelectorAll('script').length]"
    assert browser.value(found) == ["t.json · otel-torchprof", 0, 2]
    assert [url for url in browser.requests if not url.startswith("file:")] == []
    forbidden = "fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')"
    assert browser.value(forbidden) == "refused"
    assert any("Content Security Policy" in str(message) for message in browser.messages)


def test_requests_and_categories(tmp_path):
    """The requests of a service, and what memory was for, are drawn, with what a key says of them."""
    with otp.profile(record_shapes=True, profile_memory=True, with_stack=True) as prof:
        torch.nn.Linear(64, 64)(torch.ones(32, 64)).sum().backward()
    prof.report(tmp_path / "memory.html")
    assert cli.main(["report", str(served(tmp_path / "t.json", 30)), "-o", str(tmp_path / "served.html"), "-q"]) == 0
    browser = Browser(tmp_path / "browser")
    try:
        browser.open(tmp_path / "served.html")
        assert text(browser, "h1") == "30 requests, median 1.00 ms, longest 4.00 ms"
        browser.value("document.querySelector('#requests canvas').focus()")
        browser.key("ArrowRight")
        assert text(browser, "#requests .detail").startswith("request 0 duration 1.00 ms")
        assert browser.value("document.querySelectorAll('#requests tbody tr').length") == 3
        browser.open(tmp_path / "memory.html")
        browser.value("document.querySelectorAll('#memory canvas')[1].focus()")
        browser.key("ArrowRight")
        assert "parameter" in text(browser, "#memory .legend")
        assert "parameter 1" in browser.value("document.querySelectorAll('#memory .detail')[1].textContent")
        assert browser.messages == []
    finally:
        browser.close()


def test_no_change_has_no_sign(tmp_path):
    """A change that rounds to zero is neither an increase nor a decrease."""
    for name in ("a", "b"):
        kineto(tmp_path / f"{name}.json", 30, lambda begin: [piece("aten::mm", begin + 1, 3)])
    page = tmp_path / "diff.html"
    assert cli.main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--html", str(page)]) == 0
    browser = Browser(tmp_path / "browser")
    try:
        browser.open(page)
        zero = "0.0 %"
        expected = f"A median step {zero} (95 % interval {zero} to {zero}); a typical operator {zero}."
        assert text(browser, "#changes .lead").startswith(expected)
        written = "[-1, 1, -(2 ** 21)].map((bytes) => signed(unitOf('bytes', 2 ** 20).written(bytes)))"
        assert browser.value(written) == ["0.00", "0.00", "\u22122.00"]
    finally:
        browser.close()


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone(opened, dark):
    """On 375 pixels nothing but the table's own box is wider than the window, and colours follow the reader's preference."""
    browser = opened(width=375, height=700, dark=dark)
    assert browser.value("document.documentElement.scrollWidth") <= 375
    light = browser.value("Number(getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/)[0])")
    assert (light < 128) is dark
    assert browser.value(
        "[...document.querySelectorAll('canvas')].every((canvas) => canvas.width > 200 && canvas.height > 20)"
    )
    assert browser.messages == []
