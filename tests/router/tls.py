"""A certificate of its own for 127.0.0.1 or a name, for as long as a test runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

KINDS = {"ec": ("ec", "-pkeyopt", "ec_paramgen_curve:P-256"), "rsa": ("rsa:2048",)}


def make_certificate(
    folder: Path, names: str = "IP:127.0.0.1", kind: str = "ec", passphrase: str | None = None
) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", *KINDS[kind]),
            *(["-nodes"] if passphrase is None else ["-passout", f"pass:{passphrase}"]),
            *("-days", "1", "-subj", "/CN=test", "-addext", f"subjectAltName={names}"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key
