"""The version of the package, here and compiled into the native core."""

__version__ = "0.3.0"
