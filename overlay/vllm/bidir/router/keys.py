# SPDX-License-Identifier: Apache-2.0
"""API keys as they are given: in a file, or in the environment. What they are is in no message."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def read_keys(
    made: argparse.ArgumentParser, flag: str, path: Path | None, variable: str
) -> tuple[str, str] | None:
    """Where keys were given, for messages, and the text there; None if they were not.

    argparse ends the process on a file that cannot be read (exit 2).
    """
    if path is None:
        text = os.environ.get(variable, "")
        return (variable, text) if text else None
    source = f"{flag} {path}"
    try:
        return source, path.read_text("utf-8")
    except OSError as error:
        made.error(f"{source} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        made.error(f"{source} is not text")


def is_usable(key: str) -> bool:
    """Whether a header can carry it."""
    return bool(key) and key.isascii() and key.isprintable() and " " not in key
