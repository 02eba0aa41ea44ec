"""The tracer of calls on programs made by chance: what is recorded is what a model of the program says."""

import re
import sys

from frame_trees import recorded
from hypothesis import assume, example, given, settings
from model_of_calls import Call, Model, undisturbed
from random_calls import CAUGHT_AFTER_CLOSE, Program, drawn_programs

from otel_torchprof._columns.schema import Flag


def _calls(batch):
    """What is inside f0."""
    depths, found = {}, []
    names = [batch.names[name] for name in batch["name"].tolist()]
    for row, (name, parent) in enumerate(zip(names, batch["parent"].tolist(), strict=True)):
        if parent in depths:
            depths[row] = depths[parent] + 1
            error = batch.names[batch["error_type"][row]] if batch["flags"][row] & Flag.ERROR else None
            text = re.sub(r"^<calls>| at 0x[0-9a-f]+", "", name)
            found.append(Call(depths[row], text, batch["fwd_thread"].item(row), error))
        elif name.endswith("): f0"):
            depths[row] = 0
    return found


def _numbered(calls):
    """Identities by first sight, from 1: the numbers themselves are the tracer's affair."""
    seen = {0: 0}
    return [seen.setdefault(call.identity, len(seen)) for call in calls]


@settings(max_examples=200)
@given(drawn_programs)
@example(CAUGHT_AFTER_CLOSE)
def test_calls_are_those_of_the_model(drawn):
    """Names, lines, order and nesting of calls, which generator runs, and which calls an exception left, are the model's."""
    program = Program(drawn)
    model = Model(program)
    assume(not model.too_many and not model.is_untold)
    with undisturbed():
        batch = recorded(program.run("<calls>"))
    found = _calls(batch)
    assert [(c.depth, c.name) for c in found] == [(c.depth, c.name) for c in model.calls], program.text
    assert _numbered(found) == _numbered(model.calls), program.text
    assert [c.error for c in found] == [_known(c.error) for c in model.calls], program.text


def _known(error):
    """Before Python 3.12 the class of an exception is not known."""
    return error if error is None or sys.version_info >= (3, 12) else "_OTHER"
