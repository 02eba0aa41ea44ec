"""Extension modules; everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    cffi_modules=["otel_torchprof/_native/build.py:ffibuilder"],
    ext_modules=[
        Extension(
            "otel_torchprof._native._labels",
            sources=["native/src/sources/python_labels.cc"],
            include_dirs=["native/include"],
            depends=["native/include/otel_torchprof/recorder.h"],
            extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden"],
            language="c++",
            py_limited_api=True,
        )
    ],
)
