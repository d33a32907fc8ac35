# SPDX-License-Identifier: Apache-2.0
"""Header fields as text and as bytes, towards clients and towards nodes."""

from __future__ import annotations

from collections.abc import Sequence

# What is no UTF-8 goes on as it came.
TEXT = ("utf-8", "surrogateescape")


def encoded(lines: Sequence[str]) -> bytes:
    """A head of these lines, the blank one that ends it too; ValueError for a field that cannot be
    sent.

    Some fields repeat what somebody else has said: none may hold a line of its own.
    """
    text = "\r\n".join(lines)
    if not text.count("\r") == text.count("\n") == len(lines) - 1 or "\0" in text:
        raise ValueError("a header field holds a line end")
    return (text + "\r\n\r\n").encode(*TEXT)
