"""``otp.load`` of a black box: its events as a profile, what is open, what is missing."""

from __future__ import annotations

import pytest

import otel_torchprof as otp
from otel_torchprof._columns.schema import Flag
from otel_torchprof._files.box import BlackBox
from otel_torchprof.parsers import BlackBoxOptions


@pytest.fixture
def image(tmp_path):
    """The bytes of a box with three labels that have ended, inside of one that has not."""
    box = BlackBox(BlackBoxOptions("ops", str(tmp_path / "boxes"), 1 << 20), {"rank": 3})
    box.start()
    with otp.record_function("open"):
        for _ in range(3):
            with otp.record_function("ended"):
                pass
        yield box.path.read_bytes()
    box.stop()


@pytest.fixture
def loaded(tmp_path):
    """Loads bytes."""

    def load(content, **options):
        (tmp_path / "t.otpbox").write_bytes(content)
        return otp.load(tmp_path / "t.otpbox", **options)

    return load


def labels(prof):
    """Counts of the labels: operators of torch's library may be in the box too."""
    return {row.key: row.count for row in prof.key_averages() if not row.key.startswith("aten::")}


def test_a_box_is_a_profile(image, loaded, tmp_path):
    """Events of a box have averages, spans and a Chrome trace; what was open at the end is unfinished, and the process is the resource."""
    prof = loaded(image)
    assert labels(prof) == {"open": 1, "ended": 3}
    batch = prof.columns
    unfinished = [prof.names[name] for name in batch["name"][batch["flags"] & Flag.UNFINISHED != 0]]
    assert unfinished == ["open"]
    assert prof.health.labels == "on"
    assert prof.health.stop_ns >= batch["end"].max()
    assert prof.spans()[0].resource.attributes["torch.distributed.rank"] == 3
    for name, format_name in (("t.json", "chrome"), ("t.otlp", "otlp")):
        prof.export_as(tmp_path / name, format_name)
        assert labels(otp.load(tmp_path / name)) == {"open": 1, "ended": 3}


def test_a_part_of_a_box(image, loaded):
    """A box that is cut off is a profile of what is whole in it; without its head, or above the limit, it is refused."""
    half = loaded(image[: len(image) // 2])
    assert labels(half).keys() <= {"open", "ended"}
    with pytest.raises(otp.TorchProfError, match=r"cannot read .*t\.otpbox'"):
        loaded(image[:100])
    with pytest.raises(otp.TorchProfError, match="has 1,048,576 bytes, more than the limit of 1,000"):
        loaded(image, memory_limit=1000)
