"""The page of ``otel-torchprof top``: a row per process, as lines of text."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from otel_torchprof._answers.running import SECOND, WINDOW_NS, jobs
from otel_torchprof._columns.phases import PHASE_PREFIX, PHASES, UNATTRIBUTED
from otel_torchprof._encode.table import brief_time
from otel_torchprof.errors import printable

from .terminal import brief, duration, percent, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from otel_torchprof._answers.running import OpenThread, ProcessView

_LETTERS = dict(zip((*PHASES, UNATTRIBUTED), "dfboigptescCGw.", strict=True))
"""Letter of a phase in a bar."""
_COLORS = {
    "data": 43,
    "forward": 42,
    "backward": 44,
    "optimizer": 45,
    "collective": 41,
    "device_wait": 46,
}
"""Background of a phase in a bar, as a code of ANSI; others have none."""
_BOLD, _DIM, _WARNING = "1", "2", "1;33"
_WIDE = 120
"""Columns from which on a row has its operators."""
_BARS = (14, 20, 30)
_NOW = 26
_FOR_OPERATORS = 30
"""Columns that are left to the operators of a wide page, if what is open now needs more than its least."""
_SLOWEST = 5
_LEAST = 0.005
"""Share of the time from which on an operator is displayed."""
_MIDDLE = 100

SORTS: Mapping[str, Callable[[ProcessView], Any]] = {
    "rank": lambda view: (view.rank is None, view.rank, view.pid),
    "collectives": lambda view: (view.collectives is None, view.collectives, view.pid),
    "rate": lambda view: (view.step_rate is None, view.step_rate, view.pid),
    "memory": lambda view: (-(view.host_bytes or 0) - (view.device_bytes or 0), view.pid),
}
"""Orders of the rows, by name; the first is the default."""


_Style: TypeAlias = "Callable[[str, str], str]"


class PageState(NamedTuple):
    """What keys change."""

    sort: str = next(iter(SORTS))
    filter: str = ""
    is_typing: bool = False
    """Whether keys are the text of the filter."""


def page(
    views: Sequence[ProcessView],
    state: PageState,
    *,
    columns: int,
    lines: int | None = None,
    has_keys: bool = False,
    notes: Sequence[str] = (),
) -> list[str]:
    """The lines of the page.

    Args:
        views: all processes.
        state: order and filter.
        columns: width of the page.
        lines: height, to which the rows are cut; None: all rows.
        has_keys: whether to colour it, and to name the keys.
        notes: lines on what could not be read.
    """
    shown = [view for view in views if _matches(view, state.filter)]
    style = _styled if has_keys else _plain
    layout = _Layout.of(shown, columns, style)
    head = _head(shown, views, layout)
    rows = [line for job in jobs(shown) for line in _job_lines(sorted(job, key=SORTS[state.sort]), layout)]
    foot = [
        *_slowest(shown, columns),
        *(line for note in notes for line in textwrap.wrap(printable(note), columns)),
        _legend(shown, columns),
    ]
    foot += [_keys(state)[:columns]] if has_keys else []
    room = None if lines is None else max(lines - len(head) - len(foot) - 1, 1)
    if room is not None and len(rows) > room:
        rows = [*rows[: room - 1], f"... {len(rows) - room + 1} more lines: filter with /"]
    return [*head, *rows, "", *foot]


def _matches(view: ProcessView, text: str) -> bool:
    where = f"rank {view.rank} {view.pid} {view.program} {view.host} {_now(view)} {'late' if view.is_late else ''}"
    return text.lower() in where.lower()


class _Number(NamedTuple):
    """A column of numbers, to the right of its width."""

    head: str
    width: int
    text: Callable[[ProcessView], str | None]


def _step(view: ProcessView) -> str | None:
    return None if view.step is None else str(view.step) if view.is_numbered else f"+{view.step}"


def _rate(rate: float | None) -> str | None:
    return None if rate is None else f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"  # noqa: PLR2004 - no exponents


def _rate_of(name: str, view: ProcessView) -> str | None:
    value = (view.rates or {}).get(name)
    if value is None or name in {"tokens", "samples"}:
        return _rate(value)
    return percent(value) if name == "mfu" else brief(value)


def _size(count: int | None) -> str | None:
    return None if count is None else size(count).replace(" ", "").replace("B", "")


_RATES = {"tokens": "TOK/S", "samples": "SMP/S", "flops": "FLOP/S", "mfu": "MFU"}
_STEP_RATE = _Number("STEP/S", 6, lambda view: _rate(view.step_rate))
"""In a narrow page the median is enough, which tells nearly the same."""
_NUMBERS = (
    _Number("RANK", 4, lambda view: None if view.rank is None else str(view.rank)),
    _Number("PID", 7, lambda view: str(view.pid)),
    _Number("STEP", 7, _step),
    _STEP_RATE,
    _Number("MEDIAN", 6, lambda view: None if view.step_seconds is None else brief_time(view.step_seconds * 1e6)),
    _Number("COLL", 4, lambda view: None if view.collectives is None else f"{view.collectives:.0%}"),
    _Number("MEM", 6, lambda view: _size(view.host_bytes)),
)
_IF_KNOWN = (
    _Number("DEVICE", 6, lambda view: _size(view.device_bytes)),
    *(_Number(head, 6, partial(_rate_of, name)) for name, head in _RATES.items()),
)
"""Only where a process has them."""


class _Layout(NamedTuple):
    """Columns of the page, and how its lines are coloured."""

    numbers: Sequence[_Number]
    bar: int
    """Width of the bar."""
    now: int
    """Width of what is open now."""
    columns: int
    style: _Style

    @classmethod
    def of(cls, views: Sequence[ProcessView], columns: int, style: _Style) -> _Layout:
        usual = (each for each in _NUMBERS if columns >= _MIDDLE or each is not _STEP_RATE)
        numbers = [*usual, *(number for number in _IF_KNOWN if any(number.text(view) for view in views))]
        room = columns - sum(number.width + 1 for number in numbers)
        bar = _BARS[0] if columns < _MIDDLE else _BARS[2] if columns >= _WIDE else _BARS[1]
        bar = min(bar, max(room, 0))
        now = max(room - 1 - bar, 0)
        if columns >= _WIDE:
            longest = max((len(_now(view)) for view in views), default=0)
            now = max(min(longest, now - _FOR_OPERATORS), _NOW)
        return cls(numbers, bar, now, columns, style)

    def start(self, texts: Iterable[str | None]) -> str:
        """The columns before the bar."""
        cells = zip(self.numbers, texts, strict=True)
        return "".join(f"{'-' if text is None else text:>{number.width}} " for number, text in cells)[: self.columns]


def _head(shown: Sequence[ProcessView], views: Sequence[ProcessView], layout: _Layout) -> list[str]:
    columns, style = layout.columns, layout.style
    count = f"{len(shown)} process{'es' if len(shown) != 1 else ''}"
    hidden = f" of {len(views)}" if len(shown) != len(views) else ""
    at = time.strftime("%H:%M:%S")
    title = f"otel-torchprof top  {at}  {count}{hidden}  rates and shares: last {WINDOW_NS // SECOND} s"
    names = f"{layout.start(number.head for number in layout.numbers)}{'PHASES':<{layout.bar}} {'NOW':<{layout.now}}"
    names += " OPERATORS" if columns >= _WIDE else ""
    return [style(title[:columns], _BOLD), style(names[:columns], _DIM)]


def _job_lines(group: Sequence[ProcessView], layout: _Layout) -> Iterator[str]:
    first = group[0]
    world = max(first.run.world_size, len(group))
    ranks = f", {len(group)} of {world} ranks" if first.rank is not None and world > 1 else ""
    late = [str(view.rank) for view in group if view.is_late]
    waits = f": the others wait for rank {', '.join(late)}" if late else ""
    hosts = {view.host for view in group if view.host}
    where = f" on {', '.join(sorted(hosts))}" if hosts else ""
    title = printable(f"{first.program or 'python'}{where}{ranks}{waits}")[: layout.columns]
    yield layout.style(title, _WARNING if late else _BOLD)
    for view in group:
        yield _row(view, layout)


def _row(view: ProcessView, layout: _Layout) -> str:
    start = layout.start(number.text(view) for number in layout.numbers)
    end = f" {_now(view, layout.now):<{layout.now}}"
    if layout.columns >= _WIDE:
        end += f" {_operators(view)}"
    room = layout.columns - len(start) - layout.bar
    mark = _WARNING if view.is_late else ""
    bar = _bar(view.shares, layout.bar, layout.style)
    return layout.style(start, mark) + bar + layout.style(end[: max(room, 0)], mark)


def _bar(shares: Mapping[str, float], width: int, style: _Style) -> str:
    """The phases in proportion; each cell is of the phase in its middle."""
    if not shares:
        return f"{'-':<{width}}"
    cells = ""
    ends, total = [], 0.0
    for name, share in shares.items():
        total += share
        ends.append((total, name))
    places = ((at + 0.5) / width * total for at in range(width))
    names = (next((name for end, name in ends if place < end), UNATTRIBUTED) for place in places)
    for name, same in groupby(names):
        cells += style(_LETTERS.get(name, "?") * len(list(same)), f"30;{_COLORS[name]}" if name in _COLORS else "")
    return cells


def _now(view: ProcessView, width: int = 1000) -> str:
    """``LATE data > load_batch 5.2 s``: the root event, the innermost one where there is room, and the time of that."""
    late = "LATE " if view.is_late else ""
    if not view.threads:
        return late + (printable(view.line) or "-")
    names = [printable(call.name).removeprefix(PHASE_PREFIX) for call in view.threads[0].calls]
    lasting = _lasting(view, view.threads[0])
    whole = f"{late}{names[0]}{f' > {names[-1]}' if len(names) > 1 else ''} {lasting}"
    return whole if len(whole) <= width else f"{late}{_cut(names[0], width - len(late) - len(lasting) - 1)} {lasting}"


def _lasting(view: ProcessView, thread: OpenThread) -> str:
    seconds = max(view.looked_ns - thread.calls[-1].since_ns, 0) / SECOND
    return f"{max(seconds * 1000, 1):.0f} ms" if seconds < 0.1 else duration(seconds)  # noqa: PLR2004 - a tenth is displayed


def _operators(view: ProcessView) -> str:
    slowest = [each for each in view.operators[:_SLOWEST] if each.share >= _LEAST]
    return ", ".join(f"{_cut(printable(each.name), _NOW)} {each.share:.0%}" for each in slowest)


def _slowest(views: Sequence[ProcessView], columns: int) -> Iterator[str]:
    """The slowest operators of all displayed processes, where rows have no room for theirs."""
    total: Counter[str] = Counter()
    for view in views:
        total.update({each.name: round(each.share * 1_000_000) for each in view.operators if each.share >= _LEAST})
    if total and columns < _WIDE:
        yield "slowest operators and labels, mean share of the time:"[:columns]
        for name, share in total.most_common(_SLOWEST):
            yield f"{share / 10_000 / len(views):6.1f}%  {printable(name)}"[:columns]


def _legend(views: Sequence[ProcessView], columns: int) -> str:
    used = {name for view in views for name in view.shares}
    return " ".join(f"{letter} {name}" for name, letter in _LETTERS.items() if name in used)[:columns]


def _keys(state: PageState) -> str:
    if state.is_typing:
        return f"filter: {printable(state.filter)}_  (Enter: keep, Esc: none)"
    return f"q quit   s sort: {state.sort}   / filter: {printable(state.filter) or 'none'}"


def _cut(text: str, width: int) -> str:
    """The text, without its middle if it is too long: its end has the time."""
    if len(text) <= width:
        return text
    kept = max(width - 2, 0)
    return f"{text[: kept - kept * 2 // 3]}..{text[len(text) - kept * 2 // 3 :]}"[:width]


def _styled(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if code and text else text


def _plain(text: str, _code: str) -> str:
    return text
