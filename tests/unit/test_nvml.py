"""NVML: what a card tells, what it refuses, which cards CUDA shows; against a library that stands in for NVIDIA's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import nvml_stand_in
import pynvml
import pytest
from forked import in_child
from nvml_stand_in import DRIVER_NOT_LOADED, GPU_IS_LOST, NO_PERMISSION, NOT_SUPPORTED, VERSION_MISMATCH

from otel_torchprof._record.nvml import Gpu, Nvml, RefusedError, visible

nvml = nvml_stand_in.nvml
stand_in_library = nvml_stand_in.stand_in_library

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def opened(nvml):
    user = Nvml()
    user.open()
    yield user
    user.close()


def only_card(user):
    cards, silent = user.cards({})
    assert silent == []
    (card,) = cards
    return card


def test_a_card_is_described(opened):
    """UUID, model, serial number, firmware and driver are what NVML says."""
    card = only_card(opened)
    assert (card.uuid, card.index, card.name) == ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 0, "GPU 0")
    assert (card.model, card.serial) == ("NVIDIA H100 80GB HBM3", "1650522003820")
    assert (card.driver, card.firmware) == ("580.65.06", "96.00.74.00.1C")
    assert (card.mig, card.instances) == (False, ())


def test_quantities_are_in_the_conventions_units(opened):
    """Percent become fractions, milliwatts watts, millijoules joules; bytes and degrees stay."""
    card = only_card(opened)
    assert [opened.utilization(card, task) for task in ("general", "encoder", "decoder")] == [0.87, 0.12, 0.05]
    assert opened.memory(card) == (21380202496, 85520809984)
    assert (opened.temperature(card), opened.power(card), opened.energy(card)) == (54.0, 412.345, 987654.321)
    assert opened.transferred(card) == {"receive": 2345678901234, "transmit": 1234567890123}
    assert opened.errors(card) == {"corrected": 3, "uncorrected": 0}
    assert opened.status(card) == "ok"


@pytest.mark.parametrize("key", ["rows.pending", "rows.failed", "pages.pending"])
def test_bad_memory_degrades_a_card(nvml, opened, key):
    """Rows or pages that wait to be put out of use, or could not be, make the state `degraded`."""
    nvml.set(f"gpu.0.{key}", 1)
    assert opened.status(only_card(opened)) == "degraded"


def test_an_older_driver_counts_its_own_memory_as_used(nvml, opened):
    """Where the newer question for memory is not known, the older one is asked."""
    nvml.fail("nvmlDeviceGetMemoryInfo_v2", 13)
    assert opened.memory(only_card(opened)) == (21380202496 + 568000512, 85520809984)


def test_a_newer_driver_without_the_old_question_for_temperature(nvml, opened):
    """Where the older question for the temperature is gone, the newer one is asked."""
    nvml.fail("nvmlDeviceGetTemperature", 13)
    assert opened.temperature(only_card(opened)) == 54.0


def test_narrow_counters_of_bytes_are_refused(nvml, opened):
    """Counters of 32 bits would wrap unseen, so their bytes are not reported."""
    nvml.set("gpu.0.field.198.type", 1)
    with pytest.raises(RefusedError, match="too narrow"):
        opened.transferred(only_card(opened))


QUANTITIES = {
    "nvmlDeviceGetUtilizationRates": lambda user, card: user.utilization(card, "general"),
    "nvmlDeviceGetEncoderUtilization": lambda user, card: user.utilization(card, "encoder"),
    "nvmlDeviceGetMemoryInfo_v2": lambda user, card: user.memory(card),
    "nvmlDeviceGetTemperature": lambda user, card: user.temperature(card),
    "nvmlDeviceGetPowerUsage": lambda user, card: user.power(card),
    "nvmlDeviceGetTotalEnergyConsumption": lambda user, card: user.energy(card),
    "nvmlDeviceGetFieldValues": lambda user, card: user.transferred(card),
    "nvmlDeviceGetTotalEccErrors": lambda user, card: user.errors(card),
    "nvmlDeviceGetRemappedRows": lambda user, card: user.status(card),
}


@pytest.mark.parametrize("function", QUANTITIES)
def test_a_lost_card_says_so_at_every_question(nvml, opened, function):
    """Whatever is asked of a lost card is refused as lost."""
    card = only_card(opened)
    nvml.fail(function, GPU_IS_LOST)
    with pytest.raises(RefusedError, match="GPU is lost") as refused:
        QUANTITIES[function](opened, card)
    assert refused.value.lost


@pytest.mark.parametrize("function", [name for name in QUANTITIES if name != "nvmlDeviceGetMemoryInfo_v2"])
@pytest.mark.parametrize("code", [NO_PERMISSION, 998, 999])
def test_any_other_error_is_a_reason(nvml, opened, function, code):
    """An error of any number, one that nvidia-ml-py does not know too, is a reason and does not mean lost."""
    card = only_card(opened)
    nvml.fail(function, code)
    with pytest.raises(RefusedError) as refused:
        QUANTITIES[function](opened, card)
    assert (refused.value.code, refused.value.lost) == (code, False)
    assert str(refused.value)


def test_a_single_field_may_be_refused(nvml, opened):
    """A card without counters of bytes answers the question and refuses the fields."""
    nvml.set("gpu.0.field.197", None)
    with pytest.raises(RefusedError, match="Not Supported") as refused:
        opened.transferred(only_card(opened))
    assert refused.value.code == NOT_SUPPORTED


def test_text_that_is_no_utf8_is_left_out(nvml, opened):
    """A name that cannot be decoded costs the name, not the card."""
    nvml.library.stand_in_set(b"gpu.0.name", b"\xff\xfe")
    assert only_card(opened).model is None


def test_a_silent_card_does_not_hide_the_others(nvml, opened):
    """A card that is lost when cards are listed is named with its reason, and the other one is found."""
    nvml.read("two_cards")
    opened.is_open = False
    opened.open()
    nvml.set("gpu.0.lost", 1)
    cards, silent = opened.cards({})
    assert [card.name for card in cards] == ["GPU 1"]
    assert silent == ["GPU 0 does not answer: GPU is lost"]


def test_mig_devices_are_found(nvml, opened):
    """MIG devices have their card as parent, their own memory, and the place that CUDA_VISIBLE_DEVICES may name."""
    nvml.read("mig")
    opened.is_open = False
    opened.open()
    card = only_card(opened)
    assert card.mig
    assert [each.name for each in card.instances] == ["GPU 0 MIG 0", "GPU 0 MIG 1"]
    assert {each.parent for each in card.instances} == {card.uuid}
    assert card.instances[0].place == f"MIG-{card.uuid}/2/0"
    assert opened.memory(card.instances[0]) == (5234491392, 20937965568)
    with pytest.raises(RefusedError, match="split by MIG"):
        opened.utilization(card, "general")
    assert nvml.calls("nvmlDeviceGetUtilizationRates") == 0


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (DRIVER_NOT_LOADED, "driver is not loaded", True),
        (VERSION_MISMATCH, "driver was changed under a running system", False),
        (999, "Unknown Error", False),
    ],
)
def test_failing_to_initialise_is_a_reason(nvml, code, reason, expected):
    """Each way that NVML fails at its start is told, with the way out where there is one."""
    nvml.fail("nvmlInitWithFlags", code)
    user = Nvml()
    with pytest.raises(RefusedError, match=reason) as refused:
        user.open()
    assert (user.is_open, refused.value.expected) == (False, expected)
    user.close()
    assert nvml.calls("nvmlShutdown") == 0


def no_library(name):
    raise OSError(f"{name}: cannot open shared object file")


def test_a_missing_library_is_a_reason(monkeypatch):
    """Without NVIDIA's library pynvml's own error becomes the reason."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", no_library)
    with pytest.raises(RefusedError, match=r"Shared Library Not Found \(there is no libnvidia-ml"):
        Nvml().open()


def test_a_missing_binding_is_a_reason(monkeypatch):
    """Without nvidia-ml-py the reason names it."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RefusedError, match="nvidia-ml-py is not installed"):
        Nvml().open()


def test_users_of_nvml_do_not_disturb_each_other(nvml):
    """NVML stays initialised until the last user has closed it; closing twice counts once."""
    first, second = Nvml(), Nvml()
    first.open()
    first.open()
    second.open()
    first.close()
    first.close()
    assert nvml.users == 1
    assert only_card(second).name == "GPU 0"
    second.close()
    assert nvml.users == 0


def test_nvml_shut_down_by_others_is_closed(nvml, opened):
    """When somebody shuts NVML down once too often, it is told and can be opened anew."""
    card = only_card(opened)
    pynvml.nvmlShutdown()
    with pytest.raises(RefusedError, match="Uninitialized"):
        opened.power(card)
    assert not opened.is_open
    opened.open()
    assert opened.power(only_card(opened)) == 412.345


def test_a_forked_child_opens_anew(nvml, opened):
    """In a child it is closed until opened, then answers; the parent's stays open."""

    def child():
        before = opened.is_open
        opened.open()
        return before, opened.power(only_card(opened)), nvml.calls("nvmlShutdown")

    assert in_child(child) == "(False, 412.345, 0)"
    assert opened.is_open


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_amid_a_call_leaves_the_child_without(nvml, opened):
    """When another thread was inside NVML at the fork, the child says so and never goes in."""
    card = only_card(opened)
    nvml.block("nvmlDeviceGetPowerUsage")
    thread = threading.Thread(target=opened.power, args=(card,))
    thread.start()
    nvml.wait_until_blocked()

    def child():
        try:
            opened.open()
        except RefusedError as refusal:
            return str(refusal)
        return "opened"

    said = in_child(child)
    nvml.release()
    thread.join()
    assert said == "'this process was forked while another thread was inside NVML'"


def test_pynvml_finds_the_stand_in_by_itself(stand_in_library):
    """Where the system's loader finds the stand-in under the library's name, pynvml takes it unprompted."""
    stand_in = f"import ctypes, nvml_stand_in as s; ctypes.CDLL({str(stand_in_library)!r})"
    read = f"{stand_in}.stand_in_read(str(s.HERE / 'recordings' / 'data_centre.txt').encode())"
    program = (
        f"{read}\nfrom otel_torchprof._record.nvml import Nvml\nn = Nvml(); n.open(); print(n.cards({{}})[0][0].model)"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    environment = os.environ | {"LD_LIBRARY_PATH": str(stand_in_library.parent), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("NVIDIA H100 80GB HBM3", "")


def card(uuid, model="A", instances=()):
    return Gpu(uuid, 0, "", model, None, None, None, None, mig=bool(instances), instances=instances)


def instance(uuid, place):
    return Gpu(uuid, 0, "", None, None, None, None, None, parent="GPU-bb", place=place)


LIKE = (card("GPU-aa1"), card("GPU-aa2"), card("GPU-bb"))
UNLIKE = (card("GPU-aa1"), card("GPU-aa2"), card("GPU-bb", "B"))
SPLIT = (
    card("GPU-aa1"),
    card("GPU-bb", instances=(instance("MIG-c1", "MIG-GPU-bb/1/0"), instance("MIG-c2", "MIG-GPU-bb/2/0"))),
)


@pytest.mark.parametrize(
    ("text", "displayed"),
    [
        (None, "GPU-aa1 GPU-aa2 GPU-bb"),
        ("", ""),
        ("-1", ""),
        ("none", ""),
        ("0", "GPU-aa1"),
        ("2,0", "GPU-bb GPU-aa1"),
        (" 1 , +2", "GPU-aa2 GPU-bb"),
        ("0,2,-1,1", "GPU-aa1 GPU-bb"),
        ("0,7,1", "GPU-aa1"),
        ("0,,1", "GPU-aa1"),
        ("1gpu,2", "GPU-aa2 GPU-bb"),
        ("0,1,0", ""),
        ("GPU-bb", "GPU-bb"),
        ("GPU-b", "GPU-bb"),
        ("GPU-bb,GPU-aa1", "GPU-bb GPU-aa1"),
        ("GPU-aa,GPU-bb", ""),
        ("GPU-bb,GPU-zz,GPU-aa1", "GPU-bb"),
        ("GPU-bb,0", "GPU-bb"),
        ("GPU-bb,GPU-b", ""),
        ("0,GPU-bb", "GPU-aa1"),
        ("MIG-c1", ""),
        ("gpu-bb", ""),
    ],
)
def test_cuda_visible_devices(text, displayed):
    """Numbers, UUIDs and their beginnings, no or bad entries and double ones choose the cards that CUDA would."""
    found = visible(LIKE, text, None)
    assert " ".join(gpu.uuid for gpu in found.gpus) == displayed
    assert bool(found.reason) == (text is not None)


@pytest.mark.parametrize(
    ("text", "displayed"),
    [
        ("MIG-c2", "MIG-c2"),
        ("MIG-c2,MIG-c1", "MIG-c2"),
        ("MIG-GPU-bb/1/0", "MIG-c1"),
        ("MIG-GPU-bb/9/0", ""),
        ("MIG-c", ""),
        ("1", "GPU-bb"),
        ("GPU-bb", "GPU-bb"),
    ],
)
def test_cuda_visible_mig_devices(text, displayed):
    """A MIG device is named by its UUID or by its place, and CUDA shows one of them."""
    assert " ".join(gpu.uuid for gpu in visible(SPLIT, text, "PCI_BUS_ID").gpus) == displayed


def test_numbers_of_unlike_cards_need_the_order_of_the_bus():
    """CUDA counts unlike cards by speed, which NVML cannot tell: then numbers choose none, with the way out."""
    assert [gpu.uuid for gpu in visible(UNLIKE, "2", "PCI_BUS_ID").gpus] == ["GPU-bb"]
    by_speed = visible(UNLIKE, "2", None)
    assert by_speed.gpus == ()
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in by_speed.reason
    assert [gpu.uuid for gpu in visible(UNLIKE, "GPU-bb", None).gpus] == ["GPU-bb"]
    assert "shows no GPU" in visible(UNLIKE, "", None).reason


@pytest.mark.parametrize(
    ("cards", "text", "order", "ordered"),
    [
        (LIKE, None, None, True),
        (UNLIKE, None, "PCI_BUS_ID", True),
        (UNLIKE, None, None, False),
        (UNLIKE, None, "FASTEST_FIRST", False),
        (UNLIKE, "GPU-bb,GPU-aa1", None, True),
        (SPLIT, "MIG-c2", None, True),
    ],
)
def test_when_cudas_order_is_known(cards, text, order, ordered):
    """The order is CUDA's where cards are alike, counted by the bus, or named by UUID."""
    assert visible(cards, text, order).ordered is ordered
