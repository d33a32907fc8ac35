"""What a run has found: conversations that are compared, and plain yes-or-no checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.gpu.measure import Measured


@dataclass(frozen=True)
class Check:
    """One thing that must be so. `found`: what was there, in figures."""

    name: str
    right: bool
    found: str


@dataclass
class Findings:
    """Grows while a topology runs, so that what was found before an engine failed is not lost.

    figures: what is shown and not judged. wanted: conversations that there should be.
    """

    wanted: int = 0
    cases: list[Measured] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, right: bool, found: str) -> None:
        """Note one check."""
        self.checks.append(Check(name, right, found))

    def equal(self, name: str, found: object, expected: object) -> None:
        """Note whether two things are equal."""
        told = f"{found}" if found == expected else f"{found}, expected {expected}"
        self.check(name, found == expected, told)
