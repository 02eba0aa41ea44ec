"""Calls of small programs without torch, kept as text: the same on every version of Python, three times, in any order.

`GOLDEN_ACCEPT=1 make test` writes the texts anew.
"""

from __future__ import annotations

import gc
import itertools

import call_programs
import pytest
from frame_trees import masked, recorded
from kept_texts import check

from otel_torchprof._columns.schema import Flag

pytestmark = pytest.mark.golden

INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>")
"""Functions before Python 3.12, and since then parts of the functions around them."""

EXCEPTIONS = """\
_caught
  _failing !
    _failing !
      _failing !
        _failing !
          _failing !
            _failing !
              _failing !
                _failing !
                  _failing ! > _failing !
  _leaf > <built-in function len>
_leaf > <built-in function len>
_caught
  _tidying !
    _tidying !
      _tidying !
        _tidying !
          _tidying !
            _tidying !
              _tidying !
                _tidying !
                  _tidying !
                    _tidying !
                      <built-in method index of list object> !
                      _leaf > <built-in function len>
                    _leaf > <built-in function len>
                  _leaf > <built-in function len>
                _leaf > <built-in function len>
              _leaf > <built-in function len>
            _leaf > <built-in function len>
          _leaf > <built-in function len>
        _leaf > <built-in function len>
      _leaf > <built-in function len>
    _leaf > <built-in function len>
  _leaf > <built-in function len>
_caught
  _translating !
    _translating !
      _translating !
        _translating !
          _translating !
            _translating !
              _translating !
                _translating !
                  _translating !
                    _translating !
                      _leaf > <built-in function len>
                    _leaf > <built-in function len>
                  _leaf > <built-in function len>
                _leaf > <built-in function len>
              _leaf > <built-in function len>
            _leaf > <built-in function len>
          _leaf > <built-in function len>
        _leaf > <built-in function len>
      _leaf > <built-in function len>
    _leaf > <built-in function len>
  _leaf > <built-in function len>
_caught
  <built-in method index of list object> !
  _leaf > <built-in function len>
_caught
  <built-in function sorted> !
  _leaf > <built-in function len>
_caught
  _failing ! > _failing !
  _leaf > <built-in function len>
_caught
  <built-in function len> !
  _leaf > <built-in function len>
_leaf > <built-in function len>
"""
CONTEXT_MANAGERS = """\
early
  __init__
  __enter__
    _leaf > <built-in function len>
  __init__
  __enter__
    _leaf > <built-in function len>
  _leaf > <built-in function len>
  __exit__ x2
__init__
__enter__
  _leaf > <built-in function len>
_failing !
  _failing ! > _failing !
__exit__
_caught
  failing !
    __init__
    __enter__
      _leaf > <built-in function len>
    __init__
    __enter__
      _leaf > <built-in function len>
    _failing ! > _failing !
    __exit__ x2
  _leaf > <built-in function len>
"""
GENERATORS = """\
_counting #1
  _leaf > <built-in function len>
_leaf > <built-in function len>
_counting #1
  _leaf > <built-in function len>
_leaf > <built-in function len>
_counting #1
_delegating #2
  _counting #3
    _leaf > <built-in function len>
_delegating #2
  _counting #3
    _leaf > <built-in function len>
_delegating #2
  _counting #3
  _leaf > <built-in function len>
  <genexpr> #4
_delegating #2 > <genexpr> #4 x2
<built-in function next>
  _counting #5
    _leaf > <built-in function len>
<built-in function next>
  _guarded #6
    _leaf > <built-in function len>
<built-in function next>
  _counting #5
    _leaf > <built-in function len>
<built-in function next> > _counting #5
<built-in method send of generator object>
  _guarded #6
    _leaf > <built-in function len>
<built-in method throw of generator object>
  _guarded #6
    _leaf > <built-in function len>
<built-in method close of generator object>
  _guarded #6 !
    _leaf > <built-in function len>
<built-in function next>
  _guarded #7
    _leaf > <built-in function len>
<built-in function next>
  _guarded #8
    _leaf > <built-in function len>
<built-in method pop of list object>
_guarded #8 !
  _leaf > <built-in function len>
<built-in method clear of list object>
  _guarded #7 !
    _leaf > <built-in function len>
<built-in function sum>
  _counting #9
    _leaf > <built-in function len>
  _counting #9
    _leaf > <built-in function len>
  _counting #9
    _leaf > <built-in function len>
  _counting #9
_counting #10
  _leaf > <built-in function len>
_counting #10
_guarded #11
  _leaf > <built-in function len>
_guarded #11
  _leaf > <built-in function len>
_guarded #11
  _leaf > <built-in function len>
_caught
  <built-in function next> !
    _failing_generator #12 !
      _failing !
        _failing ! > _failing !
  _leaf > <built-in function len>
<built-in function sorted>
  _counting #13
    _leaf > <built-in function len>
  _counting #13
    _leaf > <built-in function len>
  _counting #13
  _leaf > <built-in function len> x2
"""
COROUTINES = """\
_take_turns
  <built-in method send of coroutine object>
    _coroutine #1
      __await__ #2
        _leaf > <built-in function len>
  <built-in method send of coroutine object>
    _waiting #3
      _coroutine #4
        __await__ #5
          _leaf > <built-in function len>
  <built-in method send of coroutine object>
    _consuming #6
      __aenter__ #7
        __await__ #8
          _leaf > <built-in function len>
  <built-in method send of coroutine object>
    _failing_coroutine #9
      __aenter__ #10
        __await__ #11
          _leaf > <built-in function len>
  <built-in method send of coroutine object>
    _coroutine #1
      __await__ #2
      __await__ #12
        _leaf > <built-in function len>
  <built-in method send of coroutine object>
    _waiting #3
      _coroutine #4
        __await__ #5
        _leaf > <built-in function len>
      _coroutine #13
        __await__ #14
          _leaf > <built-in function len>
  <built-in method send of coroutine object>
    _consuming #6
      __aenter__ #7 > __await__ #8
      _asynchronous #15
        __await__ #16
          _leaf > <built-in function len>
  <built-in method send of coroutine object>
    _failing_coroutine #9
      __aenter__ #10 > __await__ #11
      __await__ #17
        _leaf > <built-in function len>
  <built-in method send of coroutine object> !
    _coroutine #1
      __await__ #12
      _leaf > <built-in function len>
  _leaf > <built-in function len>
  <built-in method send of coroutine object> !
    _waiting #3
      _coroutine #13
        __await__ #14
        _leaf > <built-in function len>
  _leaf > <built-in function len>
  <built-in method send of coroutine object>
    _consuming #6
      _asynchronous #15 > __await__ #16
      _leaf > <built-in function len>
      _asynchronous #15
        __await__ #18
          _leaf > <built-in function len>
  <built-in method send of coroutine object>
    _failing_coroutine #9
      __await__ #17
      _failing ! > _failing !
      __aexit__ #19
        __await__ #20
          _leaf > <built-in function len>
  <built-in method send of coroutine object>
    _consuming #6
      _asynchronous #15 > __await__ #18
      _leaf > <built-in function len>
      _asynchronous #15
      __aexit__ #21
        __await__ #22
          _leaf > <built-in function len>
  <built-in method send of coroutine object> !
    _failing_coroutine #9 !
      __aexit__ #19 > __await__ #20
  _leaf > <built-in function len>
  <built-in method send of coroutine object>
    _consuming #6
      __aexit__ #21 > __await__ #22
      _asynchronous #23
        __await__ #24
          _leaf > <built-in function len>
  <built-in method send of coroutine object>
    _consuming #6
      _asynchronous #23 > __await__ #24
      _asynchronous #23
        __await__ #25
          _leaf > <built-in function len>
  <built-in method send of coroutine object> !
    _consuming #6
      _asynchronous #23 > __await__ #25
      _asynchronous #23
  _leaf > <built-in function len>
"""
COMPREHENSIONS = """\
_leaf > <built-in function len> x6
<genexpr> #1
  _leaf > <built-in function len>
<genexpr> #1
  _leaf > <built-in function len>
<genexpr> #1
_leaf > <built-in function len> x5
"""
CLASSES = """\
<built-in function __build_class__>
  __prepare__
    _leaf > <built-in function len>
  Made > <built-in function len>
  __new__
    <built-in method __new__ of type object>
      __set_name__
      __init_subclass__
        _leaf > <built-in function len>
  __init__
__call__
  __init__ > __init__
value
  _leaf > <built-in function len>
value
__get__
  _leaf > <built-in function len>
__set__
  _leaf > <built-in function len>
__getattr__
  <built-in method startswith of str object>
  _leaf > <built-in function len>
<built-in function hasattr>
  __getattr__ ! > <built-in method startswith of str object>
static
  _leaf > <built-in function len>
of_class
  _leaf > <built-in function len>
static
  _leaf > <built-in function len>
of_class
  _leaf > <built-in function len>
<built-in function getattr>
  value
    _leaf > <built-in function len>
<built-in function setattr> > value
__init_subclass__
  _leaf > <built-in function len>
"""
CALLBACKS = """\
<built-in function sorted>
  <lambda> x3
<built-in method sort of list object>
  _leaf > <built-in function len> x2
_leaf > <built-in function len> x2
<lambda> x2
<built-in function reduce>
  <lambda> x2
<built-in method sub of re.Pattern object>
  <lambda>
    <built-in method group of re.Match object>
    <built-in method upper of str object>
  <lambda>
    <built-in method group of re.Match object>
    <built-in method upper of str object>
<built-in function max>
  _leaf > <built-in function len> x2
<built-in function iter>
<built-in function next>
  _leaf > <built-in function len>
<built-in function any>
  _leaf > <built-in function len>
<built-in function cmp_to_key>
<built-in function sorted>
  <lambda>
    _leaf > <built-in function len>
_leaf > <built-in function len>
"""


def as_text(program):
    """A call per line, indented under its caller, or behind it where it is alone there and calls nothing.

    With `!` where an exception left it, and a generator's number.
    """
    gc.collect()
    batch = recorded(program)
    names = [masked(batch.names[name]) for name in batch["name"].tolist()]
    depths, calls, numbers = {}, [], {0: ""}
    for row, (name, parent) in enumerate(zip(names, batch["parent"].tolist(), strict=True)):
        if parent in depths and name in INLINED:
            depths[row] = depths[parent]
        elif parent in depths:
            depths[row] = depths[parent] + 1
            number = numbers.setdefault(batch["fwd_thread"].item(row), f" #{len(numbers)}")
            calls.append((depths[parent], name + number + " !" * bool(batch["flags"][row] & Flag.ERROR)))
        elif name == program.__name__:
            depths[row] = 0
    counted = [(line, len(list(group))) for line, group in itertools.groupby(_lines(calls))]
    return "".join(f"{line}{f' x{count}' if count > 1 else ''}\n" for line, count in counted)


def _lines(calls):
    depths = [*(depth for depth, _ in calls), 0, 0]
    joined = False
    for at, (depth, text) in enumerate(calls):
        if joined:
            joined = False
            continue
        joined = depths[at + 1] == depth + 1 and depths[at + 2] <= depth
        yield "  " * depth + text + (f" > {calls[at + 1][1]}" if joined else "")


PROGRAMS = [program for program in call_programs.PROGRAMS if program.__name__.upper() in globals()]


@pytest.mark.parametrize("program", PROGRAMS)
def test_calls(program):
    """Names, nesting, generators' identities and what exceptions left are those of the text."""
    check(globals(), program.__name__.upper(), lambda: as_text(program))


def test_calls_in_reversed_order():
    """What was recorded before makes no difference: the tracer returns to a clean state."""
    for program in reversed(PROGRAMS):
        assert as_text(program) == globals()[program.__name__.upper()]
