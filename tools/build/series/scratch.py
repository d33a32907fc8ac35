"""Scratch git repositories, which know nothing of the user's own git settings.

git is our differ and our three-way merger. What it prints depends on many settings, so each
repository made here gets its own, and neither the system's, the user's nor the environment's
settings are read. Files go in as bytes, never through a working tree's line-end conversion.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.build.errors import BuildError, ConfigError, OutputError

_IDENTITY = b"vllm-bidir build <build@localhost>"
_DATE = b"1700000000 +0000"
# Written into the repository, so that it also holds for what the user runs there by hand.
_CONFIG = f"""\
[user]
	name = vllm-bidir build
	email = build@localhost
[commit]
	gpgSign = false
[core]
	attributesFile = {os.devnull}
	autocrlf = false
	excludesFile = {os.devnull}
	fileMode = false
	hooksPath = {os.devnull}
	quotePath = false
[gc]
	auto = 0
[maintenance]
	auto = false
[merge]
	conflictStyle = diff3
[rerere]
	enabled = false
"""


@dataclass(frozen=True)
class Commit:
    """A commit to make: `files` replace those of the parent; no parent means an empty tree.

    `parent` is the position of an earlier commit in the same list.
    """

    message: bytes
    files: Mapping[str, bytes]
    parent: int | None = None


@dataclass(frozen=True)
class Result:
    """What a git command returned."""

    code: int
    out: bytes
    err: str


@dataclass(frozen=True)
class Scratch:
    """A repository with a working tree at `root`."""

    root: Path

    @classmethod
    def create(cls, root: Path) -> Scratch:
        """Make an empty repository in `root`, which must be missing or empty."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            if any(root.iterdir()):
                raise ConfigError(
                    f"error: {root} is not empty", next_step="delete it, or name another folder"
                )
        except OSError as error:
            raise OutputError(f"error: cannot make {root}: {error.strerror}") from error
        scratch = cls(root)
        scratch.git("init", "--quiet", "--template=", "--initial-branch=main")
        with (root / ".git" / "config").open("a", encoding="utf-8") as stream:
            stream.write(_CONFIG)
        return scratch

    def git(self, *args: str, stdin: bytes = b"", check: bool = True) -> Result:
        """Run git in this repository; raise BuildError when it fails and `check` is set."""
        try:
            # Bytes in and out: a diff of CRLF or non-UTF-8 text must come through unchanged.
            done = subprocess.run(
                ["git", *args], cwd=self.root, input=stdin, capture_output=True, env=self._env()
            )
        except FileNotFoundError as error:
            raise ConfigError(
                "error: git is not installed", [("needed", "to export and to refresh patches")]
            ) from error
        err = done.stderr.decode("utf-8", "backslashreplace").strip()
        if check and done.returncode != 0:
            kind = OutputError if "No space left on device" in err else BuildError
            raise kind(
                f"error: git {args[0]} failed in {self.root}",
                [
                    ("command", " ".join(("git", *args))),
                    ("found", err or f"exit {done.returncode}"),
                ],
            )
        return Result(done.returncode, done.stdout, err)

    def text(self, *args: str) -> str:
        """First line of what a git command prints, for object ids and the like."""
        return self.git(*args).out.decode("utf-8").strip()

    def commit_all(self, commits: Sequence[Commit]) -> list[str]:
        """Make all commits in one go; return their ids, in order."""
        # Absolute, since git would look for a relative one inside its own folder.
        marks = self.root.resolve() / ".git" / "scratch-marks"
        stream = b"".join(
            _fast_import(number, commit, f"refs/scratch/{number}")
            for number, commit in enumerate(commits, 1)
        )
        self.git("fast-import", "--quiet", "--force", f"--export-marks={marks}", stdin=stream)
        ids = dict(line.split() for line in marks.read_text("ascii").splitlines())
        return [ids[f":{number}"] for number in range(1, len(commits) + 1)]

    def file(self, revision: str, path: str) -> bytes:
        """A file's bytes in a revision; `:1`, `:2` and `:3` are the sides of a conflict."""
        return self.git("cat-file", "blob", f"{revision}:{path}").out

    def _env(self) -> dict[str, str]:
        # Without the explicit GIT_DIR, a damaged scratch repository would make git climb up
        # to the checkout that surrounds it and work there.
        env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        date = _DATE.decode("ascii")
        return env | {
            "GIT_DIR": str(self.root.resolve() / ".git"),
            "GIT_WORK_TREE": str(self.root.resolve()),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_AUTHOR_DATE": date,
            "GIT_COMMITTER_DATE": date,
            "GIT_EDITOR": "true",
            "LC_ALL": "C",
        }


def _fast_import(number: int, commit: Commit, ref: str) -> bytes:
    parts = [
        b"commit %s\nmark :%d\n" % (ref.encode("ascii"), number),
        b"committer %s %s\n" % (_IDENTITY, _DATE),
        b"data %d\n%s\n" % (len(commit.message), commit.message),
    ]
    if commit.parent is not None:
        parts.append(b"from :%d\n" % (commit.parent + 1))
    for path, data in sorted(commit.files.items()):
        parts.append(b"M 100644 inline %s\n" % _quoted(path))
        parts.append(b"data %d\n%s\n" % (len(data), data))
    return b"".join(parts)


def _quoted(path: str) -> bytes:
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'.encode()
