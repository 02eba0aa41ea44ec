"""Whether the interpreter has been told another way to call a Python function."""

import ctypes


def is_followed(function):
    """Whether CPython calls a function by anything but its own ``_PyFunction_Vectorcall``, to which each plain function points."""
    usual = ctypes.cast(ctypes.pythonapi._PyFunction_Vectorcall, ctypes.c_void_p).value
    place = _words(_plain).index(usual)
    return _words(function)[place] != usual


def _words(function):
    size = type(function).__basicsize__ // ctypes.sizeof(ctypes.c_void_p)
    return (ctypes.c_size_t * size).from_address(id(function))[:]


def _plain():
    pass
