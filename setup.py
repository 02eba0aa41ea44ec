"""Extension modules; everything else about the package is in pyproject.toml."""

import importlib.util
import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(
        "otel-torchprof cannot be built for a free-threaded Python, which it does not support: "
        "build it with the interpreter that has the GIL (python3.14 instead of python3.14t)"
    )
if importlib.util.find_spec("cffi") is None:  # setuptools would leave the core out, and say so in a warning at most
    raise SystemExit(
        "otel-torchprof cannot be built without cffi, which makes its native core: run `pip install cffi setuptools` first, or build "
        "without --no-build-isolation"
    )


def files(pattern: str) -> list[str]:
    """Paths from here, in an order that does not depend on the file system."""
    return sorted(path.as_posix() for path in Path().glob(pattern))


_MOST_COMPILERS = 4
"""At a time; each takes up to 0.4 GB, and a container may have many processors and little memory."""


class BuildExtensions(build_ext):
    """Compiles the files of a module side by side: setuptools has two modules at once at most, and one of ours is most of the work."""

    def build_extensions(self) -> None:
        """Lets the compiler's object, which takes a list of files, take them one by one, on some threads."""
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_COMPILERS)) as pool:
                objects = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_at_once
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildExtensions},
    # Both extension modules are of the stable ABI: one wheel is for all interpreters from the first that is supported.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    cffi_modules=["otel_torchprof/_native/build.py:ffibuilder"],
    ext_modules=[
        Extension(
            "otel_torchprof._native._python",
            sources=files("native/src/sources/python/*.cc"),
            include_dirs=["native/include"],
            depends=[*files("native/src/sources/python/*.h"), *files("native/include/otel_torchprof/rec*.h")],
            extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden"],
            language="c++",
            py_limited_api=True,
        )
    ],
)
