"""The native core: loading it, building the torch library, and the typed wrapper around both."""

from . import ffi as ffi
