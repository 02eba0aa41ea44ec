"""Whether the interpreter has been told another way to call a Python function."""

import ctypes
import types

_WORD = ctypes.sizeof(ctypes.c_size_t)
_VECTORCALL_OFFSET = 7 * _WORD
"""Of a type object: its member ``tp_vectorcall_offset``, where its objects have what they are called by."""


def is_followed(function):
    """Whether CPython calls a function otherwise than one that nobody has touched."""
    at = ctypes.c_ssize_t.from_address(id(types.FunctionType) + _VECTORCALL_OFFSET).value
    assert 0 < at < types.FunctionType.__basicsize__
    return _word(id(function) + at) != _word(id(_plain) + at)


def _word(address):
    return ctypes.c_size_t.from_address(address).value


def _plain():
    pass
