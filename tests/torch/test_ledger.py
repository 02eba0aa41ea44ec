"""Every event is accounted for: against what the program did, and against what a receiver of the test's own took and answered."""

from __future__ import annotations

import pytest
from accounts import GRPC, HTTP, LOADS, done

CASES = [
    pytest.param(name, protocol, marks=() if number % 4 == 2 * (protocol == HTTP) else pytest.mark.exhaustive)
    for number, name in enumerate(LOADS)
    for protocol in (GRPC, HTTP)
]
"""Every load by both protocols; where there is little time, half of the loads by one of them each, in turn."""


@pytest.mark.parametrize(("name", "protocol"), CASES)
def test_every_event_is_accounted_for(name, protocol):
    """All that the program did is recorded or dropped; all spans are at the receiver, or counted by what it answered."""
    load = LOADS[name]
    service, receiver = done(load, protocol)
    health = service.balance()
    stats = next(iter(health.exporters.values()))
    came = health.recorded + sum(health.dropped.values())
    if service.is_counted:
        assert came == service.events
    assert came > 0
    for reason in load.loses:
        assert health.dropped.get(reason) or stats.dropped.get(reason)
    assert health.spans.get("buffered", 0) == stats.waiting_spans == stats.waiting_bytes == 0
    accepted = set(receiver.accepted)
    no_response = stats.dropped.get("no_response", 0)
    assert stats.exported_spans <= len(accepted) <= stats.exported_spans + no_response
    if "too large" not in name:  # else those that are no smaller are not even sent
        assert stats.failed_spans <= len((receiver.refused | receiver.rejected) - accepted)
    assert len(receiver.unanswered - accepted) <= no_response + stats.failed_spans
    assert service.shutdown_seconds < load.deadline + 1
