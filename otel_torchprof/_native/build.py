"""Builds the native core as the cffi extension ``otel_torchprof._native._core`` (API mode).

``core.cdef`` is what cffi is told; it is made from the C headers by :func:`cdef_from_headers`, and a test proves that the
two still agree. Refresh it with ``python otel_torchprof/_native/build.py``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
INCLUDE = ROOT / "native" / "include"
HEADERS = (
    "encode.h",
    "encode_otlp.h",
    "encode_otlp_json.h",
    "encode_chrome.h",
    "inputs.h",
    "model.h",
    "device_slices.h",
    "record_format.h",
    "recorder.h",
    "sigterm.h",
)
CDEF = HERE / "core.cdef"


def _declarations(header: str) -> str:
    """What cffi can read of one header: no comments, no preprocessor, no C++, no inline functions."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    text = re.sub(r"^static inline .*?^}\n", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^OTP_STATIC_ASSERT\(.*?\);\n", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^#define (OTP_\w+) +(\w+)$", r"\n@define \1 ...", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*\n", "", text, flags=re.MULTILINE)
    text = text.replace("@define", "#define")
    return re.sub(r"\n\s*\n+", "\n", text).strip() + "\n"


def cdef_from_headers() -> str:
    """The declarations of every public header, in an order in which each uses only what stands before it."""
    folder = INCLUDE / "otel_torchprof"
    parts = [
        f"/* {name} */\n{_declarations((folder / name).read_text())}" for name in HEADERS if (folder / name).exists()
    ]
    return "/* Made from the headers in native/include by build.py: do not edit. */\n" + "\n".join(parts)


def _version() -> str:
    """The package's version, which the core carries so that the two can be compared when it is loaded."""
    found = re.search(r'^__version__ = "(.+)"$', (HERE.parent / "version.py").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError("version.py has no line of the form __version__ = ...")
    return found.group(1)


def _builder() -> FFI:
    ffi = FFI()
    ffi.cdef(CDEF.read_text())
    includes = "\n".join(
        f"#include <otel_torchprof/{name}>" for name in HEADERS if (INCLUDE / "otel_torchprof" / name).exists()
    )
    folders = [ROOT / "native" / "src" / name for name in ("core", "model", "encode")]
    sources = [path for folder in folders for path in sorted(folder.glob("*.cc"))]
    headers = [*INCLUDE.rglob("*.h"), *(ROOT / "native" / "src").rglob("*.h")]
    ffi.set_source(
        "otel_torchprof._native._core",
        includes,
        sources=[str(path.relative_to(ROOT)) for path in sources],
        depends=[str(path.relative_to(ROOT)) for path in headers],
        include_dirs=["native/include", "native/src"],
        define_macros=[("OTP_PACKAGE_VERSION", f'"{_version()}"')],
        extra_compile_args=["-O2", "-fvisibility=hidden"],
        libraries=["stdc++", "pthread"],
        source_extension=".c",
    )
    return ffi


if __name__ == "__main__":
    CDEF.write_text(cdef_from_headers())
    sys.stdout.write(f"wrote {CDEF.relative_to(ROOT)}\n")
else:
    ffibuilder = _builder()
