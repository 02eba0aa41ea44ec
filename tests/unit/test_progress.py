"""What commands say on stderr while they record and read."""

from __future__ import annotations

import io
import json

from otel_torchprof._cli import main as cli
from otel_torchprof._cli import show
from otel_torchprof._cli.terminal import Progress, ReadingProgress, duration, size


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal():
    """A line is written over once a second, the cursor goes back to its beginning, and at the end it is gone."""
    now, terminal, texts = [0.0], Terminal(), iter(["one", "two"])
    progress = Progress(lambda: next(texts), terminal, lambda: now[0])
    assert progress.report_if_due() == 1
    for now[0] in (1.0, 1.5, 2.0):
        progress.report_if_due()
    progress.stop()
    assert terminal.getvalue() == "\r\x1b[2Kone\r\r\x1b[2Ktwo\r\r\x1b[2K\r"


def test_progress_in_a_log():
    """Elsewhere lines come more and more seldom, and a stream that is closed ends it quietly."""
    now, log, reported = [0.0], io.StringIO(), []
    progress = Progress(lambda: reported.append(now[0]) or "so far", log, lambda: now[0])
    for now[0] in map(float, range(4_000)):
        progress.report_if_due()
    assert reported == [10, 30, 70, 150, 310, 630, 1230, 1830, 2430, 3030, 3630]
    assert log.getvalue() == "so far\n" * len(reported)
    log.close()
    now[0] += 1_000
    progress.report_if_due()
    progress.stop()


def test_progress_that_had_nothing_to_say():
    """What stopped before its first line has not touched the line that a program has begun."""
    terminal = Terminal()
    progress = Progress(str, terminal, lambda: 0.0)
    progress.start()
    progress.stop()
    assert terminal.getvalue() == ""


def test_progress_of_a_pipe(tmp_path):
    """Where a size is not known, because of a pipe or a file that is not there, there is no share."""
    reading = ReadingProgress([str(tmp_path / "none"), "\0"], 1)
    assert reading.line() == "otel-torchprof: reading: 0 B"


def test_figures_in_words():
    """Times and sizes are short enough for a line."""
    assert [duration(seconds) for seconds in (0.04, 59.9, 65, 3_725)] == ["0.0 s", "59.9 s", "0:01:05", "1:02:05"]
    assert [size(count) for count in (5, 1_500, 2_000_000, 3_210_000_000)] == ["5 B", "1.5 kB", "2.0 MB", "3.2 GB"]


def test_show_reads_once(tmp_path, monkeypatch, capsys):
    """``show`` says how much of the file it has read, all of it at the end, and nothing with ``--quiet``."""
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]}))
    lines, read = [], show.read

    def observed(*paths, watch):
        progress = ReadingProgress(paths, 1)

        def both(path, stream):
            watch(path, stream)
            progress.watch(path, stream)

        found = read(*paths, watch=both)
        lines.append(progress.line())
        return found

    monkeypatch.setattr(show, "read", observed)
    assert cli.main(["show", str(path), "--quiet"]) == 0
    assert lines == [f"otel-torchprof: reading [{'#' * 20}] 100% of {path.stat().st_size} B"]
    assert capsys.readouterr().err == ""
