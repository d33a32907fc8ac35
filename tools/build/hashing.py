"""Digests of files and of git blobs."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

CHUNK = 1 << 20


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def record_hash(digest: bytes) -> str:
    """A sha256 digest as RECORD writes it: urlsafe base64 without padding (PEP 376, PEP 427)."""
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")


def git_blob(data: bytes) -> str:
    """The object id that git gives to a file with this content (as in `index` lines)."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
