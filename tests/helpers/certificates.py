"""A certificate authority for one test run, made by the openssl command."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from fault_server import Tls

if TYPE_CHECKING:
    from pathlib import Path

# Python 3.13 and later insist on the key's usage and identifier.
_SIGNED = "subjectAltName={}\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
_AUTHORITY = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
_HERE = "DNS:localhost,IP:127.0.0.1"
_NAMES = {"server": _HERE, "client": _HERE, "elsewhere": "DNS:elsewhere.invalid", "expired": _HERE}


def make_tls(folder: Path) -> Tls:
    """An authority ``ca``, what it signed, and a ``stranger`` that signed itself.

    Signed are a ``server`` and a ``client`` for localhost, ``elsewhere`` for another host, and ``expired``.
    """

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for authority in ("ca", "stranger"):
        files = ("-keyout", f"{authority}.key", "-out", f"{authority}.pem")
        openssl("req", "-x509", *key, *_AUTHORITY, *files, "-subj", f"/CN={authority}", "-days", "2")
    for name, names in _NAMES.items():
        (folder / f"{name}.ext").write_text(_SIGNED.format(names))
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed_by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        files = ("-in", f"{name}.csr", "-extfile", f"{name}.ext", "-out", f"{name}.pem")
        openssl("x509", "-req", *signed_by, *files, *(_expired() if name == "expired" else ("-days", "2")))
    (folder / "client.both").write_bytes((folder / "client.pem").read_bytes() + (folder / "client.key").read_bytes())
    return Tls(folder)


def _expired() -> tuple[str, ...]:
    """What has a certificate end before now: by days alone only where OpenSSL has no words for both of its dates."""
    options = subprocess.run(["openssl", "x509", "-help"], check=True, capture_output=True, text=True)
    if "-not_after" not in options.stdout + options.stderr:
        return ("-days", "-1")
    return ("-not_before", "20200101000000Z", "-not_after", "20200102000000Z")
