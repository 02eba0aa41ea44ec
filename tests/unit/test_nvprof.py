"""Reading nvprof's files: ranges, launches and kernels put together as torch does it, and what is said of other files."""

from __future__ import annotations

import sqlite3
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

import otel_torchprof as otp
from otel_torchprof._profile import nvprof

SCHEMA = """
CREATE TABLE StringTable (_id_ INTEGER PRIMARY KEY AUTOINCREMENT, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MARKER (_id_ INTEGER PRIMARY KEY AUTOINCREMENT, flags INT NOT NULL, timestamp INT NOT NULL,
    id INT NOT NULL, objectKind INT NOT NULL, objectId BLOB NOT NULL, name INT NOT NULL, domain INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (_id_ INTEGER PRIMARY KEY AUTOINCREMENT, cbid INT NOT NULL, start INT NOT NULL,
    end INT NOT NULL, processId INT NOT NULL, threadId INT NOT NULL, correlationId INT NOT NULL, returnValue INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL (_id_ INTEGER PRIMARY KEY AUTOINCREMENT, start INT NOT NULL,
    end INT NOT NULL, deviceId INT NOT NULL, correlationId INT NOT NULL, name INT NOT NULL);
"""
MANGLED = "_ZN2at6native13reduce_kernelILi512EEEvi"
WRITTEN = "void at::native::reduce_kernel<512>(int)"
THREAD = 0xFEDC1234
"""Above 2**31, as the low words of pthread's are: the launches have it as a negative number."""


class Trace:
    """A file as nvprof writes it, of the columns that matter."""

    def __init__(self, path):
        self.path = path
        self.connection = sqlite3.connect(path)
        self.connection.execute("PRAGMA synchronous = OFF")
        self.connection.executescript(SCHEMA)
        self.strings = {}

    def string(self, text):
        """The number of a string."""
        if text not in self.strings:
            self.strings[text] = self.connection.execute(
                "INSERT INTO StringTable (value) VALUES (?)", (text,)
            ).lastrowid
        return self.strings[text]

    def insert(self, table, **row):
        """One row of a table."""
        query = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"  # noqa: S608 - our own names
        self.connection.execute(query, tuple(row.values()))

    def marker(self, number, time, name, flags, *, thread=THREAD):
        """One row: a begin (2), an end (4) or an instant (1)."""
        self.insert(
            "CUPTI_ACTIVITY_KIND_MARKER",
            flags=flags,
            timestamp=time,
            id=number,
            objectKind=2,
            objectId=struct.pack("<iq", 4711, thread),
            name=self.string(name) if name else 0,
            domain=0,
        )

    def range(self, number, name, start, end, *, thread=THREAD):
        """A begin and an end."""
        self.marker(number, start, name, 2, thread=thread)
        self.marker(number, end, None, 4, thread=thread)

    def kernel(self, correlation, launched, ran, *, name=MANGLED, call=211, device=0):
        """A launch and its kernel."""
        (thread,) = struct.unpack("<i", struct.pack("<I", THREAD))
        self.insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            cbid=call,
            start=launched[0],
            end=launched[1],
            processId=4711,
            threadId=thread,
            correlationId=correlation,
            returnValue=0,
        )
        self.insert(
            "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL",
            start=ran[0],
            end=ran[1],
            deviceId=device,
            correlationId=correlation,
            name=self.string(name),
        )

    def written(self):
        """The path, with everything in the file."""
        self.connection.commit()
        return self.path


@pytest.fixture
def trace(tmp_path):
    """An empty file of nvprof's."""
    trace = Trace(tmp_path / "trace.prof")
    yield trace
    trace.connection.close()


def test_ranges_with_their_kernels(trace):
    """Ranges in the order of their begin, microseconds, demangled names; a kernel is in every range around its launch."""
    trace.range(2, "aten::mm, seq = 0", 2_000, 9_000)
    trace.range(1, "forward", 1_000, 20_000)
    trace.marker(3, 4_000, "an instant", 1)
    trace.kernel(70, (3_000, 4_000), (30_000, 32_500))
    trace.kernel(71, (10_000, 11_000), (33_000, 34_000), name="plain", call=214, device=1)
    trace.kernel(72, (8_000, 9_500), (35_000, 36_000))  # leaves the inner range while it launches
    events = otp.load_nvprof(trace.written())
    assert isinstance(events, otp.EventList)
    assert [(e.id, e.name, e.time_range.start, e.time_range.end, e.thread, e.node_id) for e in events] == [
        (1, "forward", 1.0, 20.0, THREAD, 0),
        (2, "aten::mm, seq = 0", 2.0, 9.0, THREAD, 0),
    ]
    assert events[1].kernels == [(WRITTEN, 0, 2.5)]
    assert events[0].kernels == [(WRITTEN, 0, 2.5), (WRITTEN, 0, 1.0), ("plain", 1, 1.0)]
    assert "forward" in events.key_averages().table()


def test_kernels_go_to_their_own_thread(trace):
    """Where two threads have ranges at the same time, a kernel is in those of the thread that launched it."""
    trace.range(1, "mine", 1_000, 9_000)
    trace.range(2, "other's", 1_100, 9_100, thread=77)
    trace.kernel(70, (2_000, 3_000), (10_000, 11_000))
    assert [len(event.kernels) for event in nvprof.parse_nvprof_trace(trace.written())] == [1, 0]


def test_a_file_without_threads(trace):
    """Where the file does not name threads, everything is taken for one."""
    trace.range(1, "all", 1_000, 9_000)
    trace.kernel(70, (2_000, 3_000), (10_000, 11_000))
    trace.connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_MARKER DROP COLUMN objectId")
    trace.connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME DROP COLUMN threadId")
    trace.connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_MARKER DROP COLUMN flags")
    (event,) = nvprof.parse_nvprof_trace(trace.written())
    assert (event.thread, len(event.kernels)) == (0, 1)


spans = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted).filter(lambda span: span[0] < span[1])


@given(st.lists(spans, max_size=8), st.lists(spans, max_size=8))
def test_any_ranges_and_launches_are_put_together_as_torch_does(tmp_path_factory, ranges, launches):
    """For spans that nest, cross or touch in any way: the same events with the same kernels as torch finds."""
    torch_profiler = pytest.importorskip("torch.autograd.profiler")
    trace = Trace(tmp_path_factory.mktemp("nvprof") / "trace.prof")
    for number, (start, end) in enumerate(ranges):
        trace.range(number, f"range {number}", start, end)
    for number, span in enumerate(launches):
        trace.kernel(100 + number, span, (1000, 2000 + number))
    texts = {number: nvprof.demangled(text) for text, number in trace.strings.items()}
    theirs = {
        (event.id, event.name, event.time_range.start, event.time_range.end): sorted(
            (texts[kernel.name], kernel.device, kernel.duration) for kernel in event.kernels
        )
        for event in torch_profiler.load_nvprof(trace.written())
    }
    ours = {
        (event.id, event.name, round(event.time_range.start * 1000), round(event.time_range.end * 1000)): sorted(
            (kernel.name, kernel.device, round(kernel.duration * 1000)) for kernel in event.kernels
        )
        for event in otp.load_nvprof(trace.written())
    }
    trace.connection.close()
    assert ours == theirs


def test_many_ranges_and_launches(trace):
    """Twenty thousand of each, one after the other, take the time of one pass: torch's join compares all with all."""
    for number in range(20_000):
        trace.range(number, "range", number * 10, number * 10 + 9)
        trace.kernel(number, (number * 10 + 1, number * 10 + 2), (0, 1))
    events = nvprof.parse_nvprof_trace(trace.written())
    assert len(events) == 20_000
    assert all(len(event.kernels) == 1 for event in events)


def broken(trace, *statements):
    """The message of the error after some changes of a whole file."""
    trace.range(1, "range", 1_000, 9_000)
    trace.kernel(70, (2_000, 3_000), (10_000, 11_000))
    for statement in statements:
        trace.connection.execute(statement)
    with pytest.raises(otp.TorchProfError) as error:
        otp.load_nvprof(trace.written())
    assert str(error.value).startswith(str(trace.path))
    return str(error.value)


@pytest.mark.parametrize(
    "table", ["StringTable", *(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("MARKER", "RUNTIME", "CONCURRENT_KERNEL"))]
)
def test_a_missing_table_is_named(trace, table):
    """A database without one of nvprof's tables is told by that table."""
    assert f"has no table {table}" in broken(trace, f"DROP TABLE {table}")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("ALTER TABLE {runtime} DROP COLUMN cbid", "table {runtime} has no column cbid"),
        ("DELETE FROM {marker} WHERE flags = 4", "marker 1 in {marker} has no end"),
        ("DELETE FROM {marker} WHERE flags = 2", "marker 1 in {marker} has no begin"),
        ("UPDATE {marker} SET name = 99 WHERE name != 0", "StringTable has no string 99"),
        ("UPDATE {marker} SET timestamp = 'late'", "column timestamp of its table {marker} has the value 'late'"),
        ("UPDATE StringTable SET value = 5.5", "column value of its table StringTable has the value"),
        ("UPDATE {runtime} SET cbid = 20", "expected its cbid to be one of 13 (cudaLaunch), 211 (cudaLaunchKernel)"),
        ("INSERT INTO {marker} SELECT NULL, flags, timestamp, id, 2, objectId, name, 0 FROM {marker}", "duplicate key"),
    ],
)
def test_what_is_wrong_is_said(trace, statement, message):
    """Damage is told by table, column, row or number."""
    names = {"marker": "CUPTI_ACTIVITY_KIND_MARKER", "runtime": "CUPTI_ACTIVITY_KIND_RUNTIME"}
    if "5.5" in statement:
        trace.connection.execute("DROP TABLE StringTable")
        trace.connection.execute("CREATE TABLE StringTable (_id_ INTEGER PRIMARY KEY AUTOINCREMENT, value)")
    assert message.format(**names) in broken(trace, statement.format(**names))


def test_a_range_that_was_open_at_the_end_is_left_out(trace, caplog):
    """A file of a run that was stopped inside a range has all its other ranges, and a warning counts the ones without."""
    trace.range(1, "done", 1_000, 2_000)
    trace.range(2, "open", 3_000, 9_000)
    trace.connection.execute("DELETE FROM CUPTI_ACTIVITY_KIND_MARKER WHERE flags = 4 AND id = 2")
    assert [event.name for event in otp.load_nvprof(trace.written())] == ["done"]
    assert "1 ranges were open at its end" in caplog.text


def test_other_files(trace, tmp_path):
    """A file that is no database, one that is cut off, and one that is not there; nothing is created."""
    text = tmp_path / "trace.json"
    text.write_text("{}")
    with pytest.raises(otp.TorchProfError, match=r"trace.json is no SQLite file"):
        otp.load_nvprof(text)
    for number in range(2000):
        trace.range(number, f"range {number}", number, number + 1)
    whole = trace.written().read_bytes()
    cut = tmp_path / "cut.prof"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(otp.TorchProfError, match=r"cut.prof cannot be read as SQLite"):
        otp.load_nvprof(str(cut))
    with pytest.raises(FileNotFoundError):
        otp.load_nvprof(tmp_path / "none.prof")
    assert not (tmp_path / "none.prof").exists()


def test_a_name_with_odd_characters(tmp_path):
    """A path is a path, whatever stands in it."""
    trace = Trace(tmp_path / "a?b#c %20é.prof")
    trace.range(1, "range", 1_000, 9_000)
    assert len(otp.load_nvprof(trace.written())) == 1
    trace.connection.close()


def test_names_that_are_no_symbols_stay():
    """Only C++ symbols are demangled: a marker may be called i, which is a mangled int."""
    assert [nvprof.demangled(name) for name in (MANGLED, "i", "_Zebra", "é")] == [WRITTEN, "i", "_Zebra", "é"]


def test_unique():
    """The second time raises, and names the key."""
    unique = otp.EnforceUnique()
    unique.see(1, 2)
    unique.see(1, 3)
    with pytest.raises(RuntimeError, match=r"^duplicate key: \(1, 2\)$"):
        unique.see(1, 2)
