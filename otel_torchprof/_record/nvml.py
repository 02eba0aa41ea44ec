"""NVIDIA's management library (NVML) through ``pynvml``, which only this module imports.

Every failure is a :class:`RefusedError` with a reason: no driver, no library, a card without the quantity, a card that has
fallen off the bus. Units are those of the semantic conventions: fractions, bytes, watts, joules.

Source of the functions, their units and their limits: NVIDIA's "NVML API Reference Guide".
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from otel_torchprof._process.process_changes import watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_UNINITIALIZED = 1
_FUNCTION_NOT_FOUND = 13
_LOST = frozenset((15, 16, 28))
"""Lost, in need of a reset, not found."""
_LACKING = frozenset((3, 13))
"""NVML's error codes for: not supported by the card, not known to the driver."""
_EXPECTED = frozenset((9, 12))
"""No driver, no library: a machine without a GPU of NVIDIA's."""
_PCIE_TRANSMIT, _PCIE_RECEIVE = 197, 198
"""``NVML_FI_DEV_PCIE_COUNT_TX_BYTES`` and ``_RX_BYTES``, which older releases of nvidia-ml-py have no name for."""
_UNSIGNED_LONG, _UNSIGNED_LONG_LONG = 2, 3
_AGGREGATE = 1
_HINTS = {
    9: "NVIDIA's driver is not loaded",
    12: "there is no libnvidia-ml.so.1, which NVIDIA's driver brings",
    18: "the driver was changed under a running system: load the new one, or restart the machine",
}


class RefusedError(Exception):
    """NVML did not do or tell something; the text is the reason."""

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(reason)
        self.code = code
        """NVML's number of the error; 0 for other reasons."""

    @property
    def lost(self) -> bool:
        """Whether the GPU itself is lost, temporarily or permanently."""
        return self.code in _LOST

    @property
    def expected(self) -> bool:
        """Whether the only reason is that the machine has no NVIDIA GPU."""
        return self.code in _EXPECTED


@dataclass(frozen=True)
class Gpu:
    """A card, or a MIG device of one."""

    uuid: str
    index: int
    """Number of the card in ``nvidia-smi``, or of a MIG device in its card."""
    name: str
    """Name as in ``nvidia-smi -L``: ``GPU 0``, ``GPU 0 MIG 1``."""
    model: str | None
    serial: str | None
    firmware: str | None
    driver: str | None
    handle: Any = field(compare=False, repr=False)
    parent: str | None = None
    """The card's UUID, for a MIG device."""
    place: str | None = None
    """``MIG-<card>/<GPU instance>/<compute instance>``, as ``CUDA_VISIBLE_DEVICES`` may name a MIG device."""
    mig: bool = False
    """Whether the card is split into MIG devices."""
    instances: tuple[Gpu, ...] = ()
    """Its MIG devices."""


class Nvml:
    """One user of NVML in this process; others, such as torch, may use it at the same time.

    Any thread may call any method, and waits for no other call; a call takes as long as the driver does, without the GIL. In a
    forked child it is closed and can be opened again, unless another thread was inside NVML at the fork: then NVML's locks
    may be held forever, and it stays off.
    """

    def __init__(self) -> None:
        self._pynvml: Any = None
        self._under_way: set[object] = set()
        self._spoilt = False
        self.is_open = False
        watch(self)

    def after_fork_in_child(self) -> None:
        """Forgets the parent's NVML session, without using it or shutting it down."""
        self._spoilt = self._spoilt or bool(self._under_way)
        self._under_way = set()
        self.is_open = False

    def open(self) -> None:
        """Initialises NVML, if that is not done.

        Raises:
            RefusedError: it cannot be had.
        """
        if self._spoilt:
            raise RefusedError("this process was forked while another thread was inside NVML")
        if self.is_open:
            return
        try:
            import pynvml
        except ImportError as error:
            raise RefusedError(f"nvidia-ml-py is not installed ({error})") from None
        self._pynvml = pynvml
        self._call("nvmlInit")
        self.is_open = True

    def close(self) -> None:
        """Shuts NVML down for this user; handles are invalid afterwards."""
        if self.is_open:
            self.is_open = False
            with contextlib.suppress(RefusedError):  # nothing remains to be freed
                self._call("nvmlShutdown")

    def cards(self, known: Mapping[str, Gpu]) -> tuple[list[Gpu], list[str]]:
        """The cards that respond, in NVML's order (by PCI bus), and a sentence for each that does not.

        Args:
            known: cards found before, by UUID; their descriptions are reused, so that their series continue.

        Raises:
            RefusedError: NVML does not list any.
        """
        answers = [self._answer(index, known) for index in range(self._call("nvmlDeviceGetCount"))]
        return [a for a in answers if isinstance(a, Gpu)], [a for a in answers if isinstance(a, str)]

    def _answer(self, index: int, known: Mapping[str, Gpu]) -> Gpu | str:
        try:
            return self._card(index, known)
        except RefusedError as refusal:
            return f"GPU {index} does not answer: {refusal}"

    def _card(self, index: int, known: Mapping[str, Gpu]) -> Gpu:
        handle = self._call("nvmlDeviceGetHandleByIndex", index)
        uuid = self._call("nvmlDeviceGetUUID", handle)
        card = known.get(uuid) or self._described(uuid, index, f"GPU {index}", handle)
        mig = self._says("nvmlDeviceGetMigMode", handle, default=(0, 0))[0] == 1
        card = replace(card, handle=handle, mig=mig, instances=())
        return replace(card, instances=self._instances(card)) if mig else card

    def _described(self, uuid: str, index: int, name: str, handle: Any) -> Gpu:
        return Gpu(
            uuid,
            index,
            name,
            model=self._says("nvmlDeviceGetName", handle),
            serial=self._says("nvmlDeviceGetSerial", handle),
            firmware=self._says("nvmlDeviceGetVbiosVersion", handle),
            driver=self._says("nvmlSystemGetDriverVersion"),
            handle=handle,
        )

    def _instances(self, card: Gpu) -> tuple[Gpu, ...]:
        instances = []
        for index in range(self._says("nvmlDeviceGetMaxMigDeviceCount", card.handle, default=0)):
            try:
                handle = self._call("nvmlDeviceGetMigDeviceHandleByIndex", card.handle, index)
                uuid = self._call("nvmlDeviceGetUUID", handle)
            except RefusedError:
                continue  # numbers of MIG devices have gaps
            described = self._described(uuid, index, f"{card.name} MIG {index}", handle)
            numbers = [self._says(f"nvmlDeviceGet{kind}InstanceId", handle) for kind in ("Gpu", "Compute")]
            instances.append(replace(described, parent=card.uuid, place=f"MIG-{card.uuid}/{numbers[0]}/{numbers[1]}"))
        return tuple(instances)

    def utilization(self, gpu: Gpu, task: str) -> float:
        """Share of the last sampling period that the GPU was busy with a task, 0 to 1.

        Args:
            gpu: a card; NVML does not tell it of one that MIG splits, nor of a MIG device.
            task: ``general``, ``encoder`` or ``decoder``.
        """
        if gpu.mig or gpu.parent:
            raise RefusedError("NVML does not tell it of a GPU that is split by MIG")
        if task == "general":
            return float(self._call("nvmlDeviceGetUtilizationRates", gpu.handle).gpu / 100)
        return float(self._call(f"nvmlDeviceGet{task.title()}Utilization", gpu.handle)[0] / 100)

    def memory(self, gpu: Gpu) -> tuple[int, int]:
        """Used bytes, without the driver's own if NVML reports those, and total bytes."""
        try:
            memory = self._call("nvmlDeviceGetMemoryInfo", gpu.handle, self._pynvml.nvmlMemory_v2)
        except RefusedError as refusal:
            if refusal.lost:
                raise
            memory = self._call("nvmlDeviceGetMemoryInfo", gpu.handle)
        return int(memory.used), int(memory.total)

    def temperature(self, gpu: Gpu) -> float:
        """Degrees Celsius, of the GPU's own sensor."""
        try:
            return float(self._call("nvmlDeviceGetTemperature", gpu.handle, 0))
        except RefusedError as refusal:
            if refusal.code != _FUNCTION_NOT_FOUND:
                raise
            return float(self._call("nvmlDeviceGetTemperatureV", gpu.handle, 0))

    def power(self, gpu: Gpu) -> float:
        """Watts, of the whole board; newer cards average them over a second."""
        return float(self._call("nvmlDeviceGetPowerUsage", gpu.handle) / 1000)

    def energy(self, gpu: Gpu) -> float:
        """Joules since the driver was loaded."""
        return float(self._call("nvmlDeviceGetTotalEnergyConsumption", gpu.handle) / 1000)

    def transferred(self, gpu: Gpu) -> dict[str, int]:
        """Bytes over PCIe, ``receive`` and ``transmit``, from the card's counters.

        NVML's rate is no source: it is measured over 20 ms of all the time between two readings, and asking for it takes as
        long. Nor is a counter of 32 bits: it can wrap unseen many times between two readings.
        """
        values = self._call("nvmlDeviceGetFieldValues", gpu.handle, [_PCIE_RECEIVE, _PCIE_TRANSMIT])
        for value in values:
            if value.nvmlReturn:
                raise self._refusal(self._pynvml.NVMLError(value.nvmlReturn))
            if value.valueType not in {_UNSIGNED_LONG, _UNSIGNED_LONG_LONG}:
                raise RefusedError("the card's counters of bytes are too narrow: they wrap between two readings")
        return {"receive": int(values[0].value.ullVal), "transmit": int(values[1].value.ullVal)}

    def errors(self, gpu: Gpu) -> dict[str, int]:
        """Memory errors over the card's life, ``corrected`` and ``uncorrected``, where ECC is on."""
        kinds = ("corrected", "uncorrected")
        return {
            kind: int(self._call("nvmlDeviceGetTotalEccErrors", gpu.handle, number, _AGGREGATE))
            for number, kind in enumerate(kinds)
        }

    def status(self, gpu: Gpu) -> str:
        """Returns ``ok`` or ``degraded``: faulty memory was not remapped, or will be with the next reset."""
        rows = self._says("nvmlDeviceGetRemappedRows", gpu.handle, default=(0, 0, 0, 0), where=_LACKING)
        pages = self._says("nvmlDeviceGetRetiredPagesPendingStatus", gpu.handle, default=0, where=_LACKING)
        return "degraded" if rows[2] or rows[3] or pages else "ok"

    def _says(self, function: str, *arguments: Any, default: Any = None, where: frozenset[int] | None = None) -> Any:
        """Calls a function; returns the default for the errors in ``where`` (None: all). Other errors, and a lost GPU, raise."""
        try:
            return self._call(function, *arguments)
        except RefusedError as refusal:
            if refusal.lost or (where is not None and refusal.code not in where):
                raise
            return default

    def _call(self, function: str, *arguments: Any) -> Any:
        under_way = object()
        self._under_way.add(under_way)
        try:
            return getattr(self._pynvml, function)(*arguments)
        except self._pynvml.NVMLError as error:
            raise self._refusal(error) from None
        except (AttributeError, OSError, TypeError, ValueError) as error:
            raise RefusedError(f"{function} failed: {type(error).__name__}: {error}") from None
        finally:
            self._under_way.discard(under_way)

    def _refusal(self, error: Any) -> RefusedError:
        """Converts an error of NVML."""
        if error.value == _UNINITIALIZED:
            self.is_open = False  # another user has shut it down once too often
        hint = _HINTS.get(error.value)
        return RefusedError(f"{error} ({hint})" if hint else str(error), error.value)


# ---- GPUs visible to this process, by ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` ----


_UNKNOWN_ORDER = (
    "CUDA_VISIBLE_DEVICES names GPUs by number, and CUDA counts unlike ones by speed, which NVML cannot tell: "
    "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID"
)


@dataclass(frozen=True)
class VisibleDevices:
    """The devices that CUDA makes visible."""

    gpus: tuple[Gpu, ...]
    """Cards, or one MIG device."""
    reason: str = ""
    """Why some devices are missing; empty if none is."""
    ordered: bool = True
    """Whether they are in CUDA's order, so that a device's number in torch is its index here."""


def visible(cards: Sequence[Gpu], text: str | None, order: str | None) -> VisibleDevices:
    """Returns the GPUs that a process with these environment variables can use.

    Args:
        cards: all cards, in the order of the PCI bus.
        text: ``CUDA_VISIBLE_DEVICES``; None if not set.
        order: ``CUDA_DEVICE_ORDER``.
    """
    by_speed = order != "PCI_BUS_ID" and len({card.model for card in cards}) > 1
    if text is None:
        return VisibleDevices(tuple(cards), ordered=not by_speed)
    if text.startswith("GPU-"):
        return _devices_named(text, lambda entry: _by_prefix(entry, "GPU-", cards))
    if text.startswith("MIG-"):
        instances = [instance for card in cards for instance in card.instances]
        devices = _devices_named(text, lambda entry: _by_prefix(entry, "MIG-", instances))
        return VisibleDevices(devices.gpus[:1], devices.reason)  # a process can use only the first MIG device
    if by_speed and text.strip():
        return VisibleDevices((), _UNKNOWN_ORDER)
    return _devices_named(text, lambda entry: _by_number(entry, cards))


def _devices_named(text: str, find: Callable[[str], Gpu | None]) -> VisibleDevices:
    """The devices in a list, up to the first unknown entry."""
    devices: list[Gpu] = []
    for entry in text.split(","):
        gpu = find(entry)
        if gpu is None:
            break
        if gpu in devices:
            return VisibleDevices((), f"CUDA_VISIBLE_DEVICES={text!r} names a GPU twice: CUDA then shows none")
        devices.append(gpu)
    return VisibleDevices(tuple(devices), f"CUDA_VISIBLE_DEVICES={text!r} shows no {'other ' if devices else ''}GPU")


def _by_prefix(entry: str, kind: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """The one GPU whose UUID begins so; a MIG device may also be named by its place."""
    named = [gpu for gpu in gpus if gpu.uuid.startswith(entry) or gpu.place == entry]
    return named[0] if entry.startswith(kind) and len(named) == 1 else None


def _by_number(entry: str, cards: Sequence[Gpu]) -> Gpu | None:
    """The card of this number; like CUDA, letters after the digits are overlooked."""
    digits = re.match(r"\s*\+?(\d+)", entry)
    return cards[int(digits[1])] if digits and int(digits[1]) < len(cards) else None
