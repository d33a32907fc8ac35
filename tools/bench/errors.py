"""What ends a benchmark with one message: what was expected, what was found, what to do next."""

from __future__ import annotations


class BenchError(Exception):
    """A benchmark cannot go on, or its results cannot be used.

    The message is a headline, and below it one row for each of file, expected, found and next that
    is given.
    """

    def __init__(
        self,
        subject: str,
        *,
        file: object = None,
        expected: object = None,
        found: object = None,
        next_step: str = "",
    ) -> None:
        rows = {"file": file, "expected": expected, "found": found, "next": next_step or None}
        shown = [f"  {name:<8}  {text}" for name, text in rows.items() if text is not None]
        super().__init__("\n".join([f"error: {subject}", *shown]))
        self.subject = subject
