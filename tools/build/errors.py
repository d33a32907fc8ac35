"""What can go wrong in a build, and the exit code that each kind of failure has.

Every error says what was expected, what was found and what to do next, so that the
command line can print it as it is and stop.
"""

from __future__ import annotations

from collections.abc import Iterable


class BuildError(Exception):
    """A build step cannot go on.

    `subject` is the headline; `details` are (word, text) rows shown below it; `next_step`
    tells the reader what to do.
    """

    exit_code = 2

    def __init__(
        self,
        subject: str,
        details: Iterable[tuple[str, str]] = (),
        next_step: str = "",
    ) -> None:
        super().__init__(subject)
        self.subject = subject
        self.details = tuple(details)
        self.next_step = next_step

    def __str__(self) -> str:
        rows = list(self.details)
        if self.next_step:
            rows.append(("next", self.next_step))
        width = max((len(word) for word, _ in rows), default=0)
        lines = [self.subject]
        for word, text in rows:
            first, *rest = text.split("\n")
            lines.append(f"  {word:<{width}}  {first}")
            lines.extend(f"  {'':<{width}}  {line}" for line in rest)
        return "\n".join(lines)


class ConfigError(BuildError):
    """upstream.toml, patches/series, a patch file or an option cannot be used (exit 2)."""

    exit_code = 2


class ProofError(BuildError):
    """A check of something finished found it wrong: prove, check-installed, lint (exit 1)."""

    exit_code = 1

    @classmethod
    def collect(cls, subject: str, problems: list[str], next_step: str = "") -> ProofError:
        """One error that lists every problem, not only the first."""
        return cls(subject, [("found", problem) for problem in problems], next_step)


class PatchError(BuildError):
    """A patch does not apply exactly, or a rebase met a conflict (exit 3)."""

    exit_code = 3


class FetchError(BuildError):
    """A base release cannot be had, or is not the one that is pinned (exit 4)."""

    exit_code = 4


class OverlayError(BuildError):
    """An overlay file or entry point would replace something of the base (exit 5)."""

    exit_code = 5


class OutputError(BuildError):
    """The result cannot be written: no space, no permission (exit 6)."""

    exit_code = 6


EXIT_CODES = """exit codes:
  0  done
  1  a check found something wrong (prove, check-installed, lint)
  2  bad option, upstream.toml, series or patch file
  3  a patch does not apply at its exact place, or a rebase met a conflict
  4  the base release cannot be fetched, or is not the pinned one
  5  an overlay file or entry point would replace something of the base
  6  the result cannot be written (disk full, no permission)"""
