"""Builds the native core as the cffi extension ``otel_torchprof._native._core`` (API mode).

``core.cdef`` has its declarations for cffi, ``torch.cdef`` those of the torch library, which is built on the user's machine. Both are
generated from the C headers (:data:`CDEFS`), and a test compares them. Update them with ``python otel_torchprof/_native/build.py``.
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
    "encode_averages.h",
    "encode_otlp.h",
    "encode_otlp_json.h",
    "encode_chrome.h",
    "encode_perfetto.h",
    "inputs.h",
    "model.h",
    "display.h",
    "placing.h",
    "device_slices.h",
    "record_format.h",
    "recorder.h",
    "blackbox.h",
    "sigterm.h",
    "hang_watch.h",
    "trace_files.h",
)
TORCH = ROOT / "native" / "src" / "sources" / "torch"
TORCH_HEADERS = ("ops.h", "memory.h", "devices.h", "collectives.h", "ranges.h", "record_function_fast.h")
CDEF = HERE / "core.cdef"


def _declarations(header: str) -> str:
    """Returns the declarations of a header that cffi can read: no comments, preprocessor, C++ or inline functions."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    text = re.sub(r"^static inline .*?^}\n", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^OTP_STATIC_ASSERT\(.*?\);\n", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^#define (OTP_\w+) +(\w+)$", r"\n@define \1 ...", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*\n", "", text, flags=re.MULTILINE)
    text = text.replace("@define", "#define")
    return re.sub(r"\n\s*\n+", "\n", text).strip() + "\n"


def _all_declarations(folder: Path, names: tuple[str, ...], before: str = "") -> str:
    """Returns the declarations of headers, which must be ordered such that each uses only earlier ones."""
    parts = [f"/* {name} */\n{_declarations((folder / name).read_text())}" for name in names]
    made = f"/* Made from the headers in {folder.relative_to(ROOT).as_posix()} by build.py: do not edit. */\n"
    return made + before + "\n".join(parts)


def core_cdef() -> str:
    """Returns the declarations of every public header of the core."""
    return _all_declarations(INCLUDE / "otel_torchprof", HEADERS)


def torch_cdef() -> str:
    """Returns the declarations of the torch library; the core's function table is an opaque type in them."""
    return _all_declarations(TORCH, TORCH_HEADERS, "typedef struct otp_api otp_api;\n\n")


CDEFS = {CDEF: core_cdef, HERE / "torch.cdef": torch_cdef}
"""The function that generates each file."""


def _version() -> str:
    """Returns the package's version, which is compiled into the core and compared when it is loaded."""
    match = re.search(r'^__version__ = "(.+)"$', (HERE.parent / "version.py").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError("version.py has no line of the form __version__ = ...")
    return match.group(1)


def _builder() -> FFI:
    ffi = FFI()
    ffi.cdef(CDEF.read_text())
    includes = "\n".join(f"#include <otel_torchprof/{name}>" for name in HEADERS)
    folders = [ROOT / "native" / "src" / name for name in ("core", "model", "encode", "files")]
    sources = [path for folder in folders for path in sorted(folder.glob("*.cc"))]
    headers = [*INCLUDE.rglob("*.h"), *(ROOT / "native" / "src").rglob("*.h")]
    ffi.set_source(
        "otel_torchprof._native._core",
        includes,
        sources=[str(path.relative_to(ROOT)) for path in sources],
        depends=[str(path.relative_to(ROOT)) for path in (*headers, HERE.parent / "version.py")],
        include_dirs=["native/include", "native/src"],
        define_macros=[("OTP_PACKAGE_VERSION", f'"{_version()}"')],
        extra_compile_args=["-O2", "-fvisibility=hidden"],
        libraries=["stdc++", "pthread"],
        source_extension=".c",
    )
    return ffi


if __name__ == "__main__":
    for cdef, make in CDEFS.items():
        cdef.write_text(make())
        sys.stdout.write(f"wrote {cdef.relative_to(ROOT)}\n")
else:
    ffibuilder = _builder()
