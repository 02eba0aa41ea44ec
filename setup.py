"""Extension modules; everything else about the package is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup


def files(pattern: str) -> list[str]:
    """Paths from here, in an order that does not depend on the file system."""
    return sorted(path.as_posix() for path in Path().glob(pattern))


setup(
    cffi_modules=["otel_torchprof/_native/build.py:ffibuilder"],
    ext_modules=[
        Extension(
            "otel_torchprof._native._python",
            sources=files("native/src/sources/python_*.cc"),
            include_dirs=["native/include"],
            depends=[*files("native/src/sources/python_*.h"), *files("native/include/otel_torchprof/rec*.h")],
            extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden"],
            language="c++",
            py_limited_api=True,
        )
    ],
)
