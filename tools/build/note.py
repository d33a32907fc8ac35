"""The change note that Apache-2.0 (section 4b) wants in each file that we modify."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from tools.build.errors import ConfigError

NOTE = b"# Modified by the vllm-bidir distribution ("
_COMMENTED = (".py", ".sh", ".toml", ".yaml", ".yml")


def add_note(path: str, data: bytes, patches: Iterable[str]) -> bytes:
    """`data` with one comment line after its leading comments, naming the patches.

    The line comes last, after all patches, so that patches never meet each other's notes.
    """
    if PurePosixPath(path).suffix not in _COMMENTED:
        raise ConfigError(
            f"error: a patch modifies {path}, in which no `#` comment can carry the change note",
            next_step=f"patch {', '.join(_COMMENTED)} files only, or extend tools/build/note.py",
        )
    lines = data.split(b"\n")
    at = 0
    while at < len(lines) - 1 and lines[at].startswith(b"#"):
        at += 1
    ending = b"\r" if lines[0].endswith(b"\r") else b""
    note = NOTE + ", ".join(patches).encode("utf-8") + b"); see its NOTICE." + ending
    return b"\n".join([*lines[:at], note, *lines[at:]])
