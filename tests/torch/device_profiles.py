"""Profiles of the simulated device, and what they tell of it."""

from __future__ import annotations

import torch

import otel_torchprof as otp
from otel_torchprof._model.devices import device_times

DEVICE = "privateuseone"


def profile(**options):
    """A profile with the times of the simulated device."""
    return otp.profile(use_device=DEVICE, **options)


def times_of(prof):
    """(name, own ns or None where it has no pair, total ns) of every event, in order."""
    batch = prof._batch()
    times = device_times(batch)
    if times is None:
        return [(batch.names[name], None, 0) for name in batch["name"]]
    duration = batch.devices["duration"]
    return [
        (batch.names[name], int(duration[pair]) if pair >= 0 else None, int(total))
        for name, pair, total in zip(batch["name"], times.pair, times.total, strict=True)
    ]


def pairs_of(prof, name):
    """The rows of the device's table for the events of a name, as dictionaries."""
    batch = prof._batch()
    table = batch.devices
    ids = {int(batch["id"][row]) for row in range(len(batch)) if batch.names[batch["name"][row]] == name}
    return [
        {key: table[key][i].item() for key in table}
        for i in range(len(table["event"]))
        if int(table["event"][i]) in ids
    ]


def tensor(*shape, device=DEVICE):
    return torch.zeros(*shape).to(device)
