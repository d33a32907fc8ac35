# SPDX-License-Identifier: Apache-2.0
"""API keys as they are given: in a file, or in the environment. What they are is in no message."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Keys:
    """The keys of one router as they are now, for all who check or show them.

    `clients` are SHA-256 digests; none: everybody may. `engine` is None if engines ask for no key.
    """

    clients: frozenset[bytes] = field(repr=False)
    engine: str | None = field(repr=False)


def given_keys(
    made: argparse.ArgumentParser,
    flag: str,
    path: Path | None,
    variable: str,
    parse: Callable[[str], T],
) -> T | None:
    """What `parse` makes of the file or the environment; None if no keys were given.

    argparse ends the process on a file that is of no use (exit 2).
    """
    source = variable if path is None else f"{flag} {path}"
    try:
        if path is not None:
            return parse(read_key_file(path))
        text = os.environ.get(variable, "")
        return parse(text) if text else None
    except ValueError as error:
        made.error(f"{source} {error}")


def read_key_file(path: Path) -> str:
    """The text; ValueError says why there is none."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError("is not text") from None


def engine_key(text: str) -> str:
    """The engines' one key; ValueError if it is none."""
    key = text.strip()
    if not is_usable(key):
        raise ValueError("must hold one key: printable ASCII without spaces")
    return key


def is_usable(key: str) -> bool:
    """Whether a header can carry it."""
    return bool(key) and key.isascii() and key.isprintable() and " " not in key
