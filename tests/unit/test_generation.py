"""What a call of generate says of itself: times that are known, and whose span has the conventions' attributes."""

from __future__ import annotations

import pytest

from otel_torchprof._columns.generation import Generation
from otel_torchprof._record import generations
from otel_torchprof._record.generations import Generations

CALL = Generation("tiny", 2, 10, 1, 8, 4, False, 1.0, 0.4)


@pytest.mark.parametrize(
    ("call", "first", "further"),
    [
        (CALL, 0.4, 0.2),
        (CALL._replace(new_tokens=1, first_token=None), 1.0, None),
        (CALL._replace(new_tokens=2), 0.4, 0.6),
        (CALL._replace(first_token=None), None, None),
        (CALL._replace(new_tokens=None), 0.4, None),
        (CALL._replace(new_tokens=0, first_token=None), None, None),
    ],
    ids=["four tokens", "one", "two", "nobody saw the first", "no result", "none"],
)
def test_times(call, first, further):
    """The time to the first token and per further one; none where it is not known or there is no such token."""
    assert call.time_to_first_token == first
    assert call.time_per_output_token == (None if further is None else pytest.approx(further))


def test_attributes_are_on_one_span():
    """What the conventions have is on the span of a request that nobody else has one for; what is ours is on each."""
    assert CALL.attributes() == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "huggingface.transformers",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 8,
        "torch.generate.batch_size": 2,
        "torch.generate.time_to_first_token": 0.4,
        "torch.generate.time_per_output_token": pytest.approx(0.2),
    }
    own = {key for key in CALL.attributes() if key.startswith("torch.")}
    assert CALL._replace(has_own_span=True).attributes().keys() == own
    assert CALL._replace(is_request=False).attributes().keys() == own
    assert CALL.missing_in({"gen_ai.request.model", *own}).keys() == CALL.attributes().keys() - {
        "gen_ai.request.model",
        *own,
    }


def test_only_the_latest_calls_are_remembered(monkeypatch):
    """Memory is bounded where nobody drains; an assistant's calls are told to nobody."""
    monkeypatch.setattr(generations, "_MOST", 2)
    known, told = Generations(), []
    known.listen(told.append)
    for event in (1, 2, 3):
        known.note(event, CALL)
    known.note(0, CALL._replace(is_request=False))
    assert known.known_among([1, 2, 3, 0]) == {2: CALL, 3: CALL}
    assert told == [CALL] * 3
    known.leave(told.append)
    known.note(4, CALL)
    assert len(told) == 3
