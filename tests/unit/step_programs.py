"""Training programs as tokens, with the segments that each of them counts itself."""

from __future__ import annotations

import random
from dataclasses import replace

from otel_torchprof._columns.phases import Part, Segment
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._model.step_cycle import StepCycle
from otel_torchprof._model.step_rules import Token

TRAIN, VALIDATE, MODEL, OPTIMIZER, SCALER = 10, 11, 20, 30, 40
CODES = {
    "N": (Part.NEXT, TRAIN),
    "F": (Part.FORWARD, MODEL),
    "B": (Part.BACKWARD, 0),
    "S": (Part.STEP, OPTIMIZER),
    "Z": (Part.ZEROING, OPTIMIZER),
    "I": (Part.INFERENCE, MODEL + 5),
    "C": (Part.CLIPPING, 0),
    "A": (Part.SCALER_STEP, SCALER),
    "U": (Part.SCALER_UPDATE, SCALER),
    "V": (Part.SAVE, 0),
    "n": (Part.NEXT, VALIDATE),
    "E": (Part.EVALUATION, MODEL),
}
KINDS = {"[": Segment.STEP, "<": Segment.EVALUATION, "{": Segment.CHECKPOINT, "(": Segment.SETUP, "|": None}


class Program:
    """Writes what a program does, and where it begins a segment itself.

    A program is written with one letter for each token, and a bracket where a segment begins: ``"[ N F B S < n E n E n"``.
    A digit after a letter is added to the key, ``*`` says that a backward pass runs in it, and ``|`` ends the loop.
    """

    def __init__(self, seed=0, *, thread=1, time=1000, scale=1):
        self.tokens = []
        self.expected = []
        self.earliest = {}
        """By when the program begins an evaluation or a checkpoint: when what it did before had ended."""
        self.time = time
        self._chance = random.Random(seed)
        self._thread = thread
        self._scale = scale
        self._begins = []

    def __call__(self, text, times=1):
        for word in text.split() * times:
            if word == "|":
                self.expected.append((self.tokens[-1].end, None))
            elif word in KINDS:
                self._begins.append(KINDS[word])
            else:
                self._add(word)
        return self

    def placed(self, found):
        """Boundaries, where the program has them if they are before that and after what it did before: whose a pause is nobody can know."""
        starts = {begin: start for start, end in self.earliest.items() for begin in range(end, start)}
        return [(starts.get(time, time), segment) for time, segment in found]

    def wait(self, duration):
        self.time += duration
        return self

    def _add(self, word):
        part, key = CODES[word[0]]
        key += int(word[1:].rstrip("*") or 0)
        start = self.time + self._chance.randint(1, 5) * self._scale
        self.time = start + self._chance.randint(2, 50) * self._scale
        self.expected += [(start, kind) for kind in self._begins]
        if self._begins and self.tokens and {Segment.EVALUATION, Segment.CHECKPOINT} & {*self._begins}:
            self.earliest[start] = self.tokens[-1].end
        self._begins.clear()
        number = len(self.tokens) + 1 + 1_000_000 * self._thread
        self.tokens.append(Token(number, part, key, start, self.time, self._thread, 7, word.endswith("*")))


def at_once(tokens):
    """The time of the one feed."""
    return [max(token.end for token in tokens)]


def one_by_one(tokens):
    """A time in each token and one after each."""
    return sorted({time for token in tokens for time in (token.start, token.end)})


def in_pieces(seed):
    """Times by chance."""

    def times(tokens):
        chance = random.Random(seed)
        first, last = min(token.start for token in tokens), max(token.end for token in tokens)
        return [*sorted(chance.randint(first, last) for _ in range(chance.randint(1, 30))), last]

    return times


def fed(cycle, tokens, times):
    """What a cycle gives for tokens that come at these times, as a recorder gives them."""
    order = sorted(range(len(tokens)), key=lambda at: tokens[at].start)
    found, begun, opens = [], 0, set()
    for time in times:
        while begun < len(order) and tokens[order[begun]].start <= time:
            opens.add(order[begun])
            begun += 1
        piece = []
        for at in sorted(opens):
            token = tokens[at]
            if token.end <= time:
                opens.discard(at)
                piece.append(token)
            else:
                piece.append(replace(token, end=NEVER, holds_backward=False))
        found += cycle.feed(piece, time)
    return found


def boundaries(tokens, times, **given):
    """Every boundary of a recording of these tokens: time and segment."""
    cycle = StepCycle(**given)
    found = [*fed(cycle, tokens, times(tokens)), *cycle.finish(max(token.end for token in tokens) + 10**9)]
    assert [boundary.time for boundary in found] == sorted(boundary.time for boundary in found)
    threads = {token.id: token.thread for token in tokens}
    assert all(threads[boundary.token] == boundary.thread for boundary in found if boundary.token)
    return [(boundary.time, boundary.segment) for boundary in found]


def check(program, *, pieces=20, **given):
    """Its boundaries are those that the program counts, however its tokens come."""
    for times in (at_once, one_by_one, *(in_pieces(seed) for seed in range(pieces))):
        found = program.placed(boundaries(program.tokens, times, **given))
        difference = sorted(set(found) ^ set(program.expected), key=str)
        assert found == program.expected, f"only found or only expected: {difference}"
