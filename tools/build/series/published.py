"""Read a diff as upstream publishes it: a plain diff, or one `git format-patch` mail."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from email import message_from_bytes
from email.header import decode_header, make_header

from tools.build.errors import ConfigError
from tools.build.patch import check_path

_SECTION = b"diff --git "
_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_MAIL = re.compile(rb"From [0-9a-f]{40} ")
_REFUSED = (
    (b"deleted file mode", "deletes it"),
    (b"rename from", "renames it"),
    (b"copy from", "copies it"),
    (b"old mode", "changes its file mode"),
    (b"GIT binary patch", "is a binary change"),
    (b"Binary files", "is a binary change"),
)
_SIDES = ((b"--- ", "a/"), (b"+++ ", "b/"))


@dataclass(frozen=True)
class Section:
    """One file's part of a diff. `source` is empty for an added file."""

    source: str
    path: str
    data: bytes
    refusal: str


@dataclass(frozen=True)
class Published:
    """A published diff: its subject, if it came as a mail, and its sections."""

    subject: str
    sections: tuple[Section, ...]


def read_published(name: str, data: bytes) -> Published:
    """Cut a published diff into its files; hunks are counted, so no line is mistaken."""
    lines = io.BytesIO(data).readlines()
    at = next((k for k, line in enumerate(lines) if line.startswith(_SECTION)), len(lines))
    if at == len(lines):
        raise ConfigError(
            f"error: {name} holds no `diff --git` line", next_step="take the pull request's .diff"
        )
    preamble = b"".join(lines[:at])
    is_mail = _MAIL.match(preamble) is not None
    mails = sum(1 for line in lines if _MAIL.match(line))
    if mails > 1:
        raise ConfigError(
            f"error: {name} holds {mails} commits, one after the other",
            next_step="take the pull request's .diff, which is their sum",
        )
    sections: list[Section] = []
    while at < len(lines) and lines[at].startswith(_SECTION):
        end = _section_end(name, lines, at, is_mail)
        sections.append(_section(name, lines[at:end]))
        at = end
    rest = b"".join(lines[at:])
    signature = is_mail and rest.startswith(b"-- \n")
    if rest.strip() and not signature:
        raise ConfigError(
            f"error: {name} has text after its last diff",
            [("line", f"{at + 1}: {lines[at].decode('utf-8', 'backslashreplace').rstrip()}")],
            "take the pull request's .diff again; it may be cut or edited",
        )
    return Published(_subject(preamble) if is_mail else "", tuple(sections))


def _section_end(name: str, lines: list[bytes], start: int, is_mail: bool) -> int:
    at = start + 1
    while at < len(lines) and not lines[at].startswith((b"@@ ", _SECTION)):
        if is_mail and lines[at] == b"-- \n":
            return at
        at += 1
    while at < len(lines) and (match := _HUNK.match(lines[at])):
        header = at
        old, new = (1 if count is None else int(count) for count in match.groups())
        at += 1
        while old > 0 or new > 0:
            mark = lines[at][:1] if at < len(lines) else b""
            if mark not in (b" ", b"\n", b"\r", b"-", b"+", b"\\") or not mark:
                raise ConfigError(
                    f"error: {name} ends inside the hunk of line {header + 1}",
                    [("expected", f"{old} more old and {new} more new lines")],
                    "fetch it again; it may be cut",
                )
            old -= mark not in (b"+", b"\\")
            new -= mark not in (b"-", b"\\")
            at += 1
        if at < len(lines) and lines[at].startswith(b"\\"):
            at += 1
    return at


def _section(name: str, lines: list[bytes]) -> Section:
    count = next((k for k, line in enumerate(lines) if line.startswith(b"@@ ")), len(lines))
    head = lines[:count]
    if any(line.endswith(b"\r\n") for line in head):
        raise ConfigError(
            f"error: {name} has CRLF line ends in its own headers",
            next_step="fetch it again without conversion; CRLF belongs into hunks only",
        )
    named = {
        word: line[len(word) :].rstrip(b"\n")
        for line in head[1:]
        for word in (b"--- ", b"+++ ", b"rename from ", b"rename to ", b"copy from ", b"copy to ")
        if line.startswith(word)
    }
    if b"+++ " in named:
        source, path = (_side(name, named[word], side) for word, side in _SIDES)
    else:
        moved = [
            named[word].decode("utf-8", "backslashreplace")
            for word in (b"rename from ", b"rename to ", b"copy from ", b"copy to ")
            if word in named
        ]
        source, path = moved if len(moved) == 2 else [_same_path(name, head[0])] * 2
        if any(line.startswith(b"new file mode") for line in head):
            source = ""
    refusal = next(
        (why for word, why in _REFUSED if any(line.startswith(word) for line in head)), ""
    )
    mode = next((line[14:].strip() for line in head if line.startswith(b"new file mode ")), b"")
    if not refusal and mode not in (b"", b"100644"):
        refusal = f"adds it with file mode {mode.decode('ascii', 'replace')}"
    for side in (source, path):
        if side:
            check_path(name, side)
    return Section(source, path or source, b"".join(lines), refusal)


def _side(name: str, raw: bytes, prefix: str) -> str:
    text = _unquoted(raw.split(b"\t", 1)[0])
    if text == "/dev/null":
        return ""
    if not text.startswith(prefix):
        raise ConfigError(
            f"error: {name} has no {prefix} before the path {text}",
            next_step="export it with git's default prefixes",
        )
    return text[2:]


def _same_path(name: str, line: bytes) -> str:
    """The path of a section without `---` and `+++`, whose two names are the same."""
    rest = line[len(_SECTION) :].rstrip(b"\n")
    half = len(rest) // 2
    first, second = _unquoted(rest[:half]), _unquoted(rest[half + 1 :])
    if not first.startswith("a/") or first[2:] != second[2:]:
        raise ConfigError(f"error: {name}: cannot tell the path in {line!r}")
    return first[2:]


def _unquoted(raw: bytes) -> str:
    """A path as git quotes it (C style, octal bytes) when it holds unusual characters."""
    if len(raw) >= 2 and raw.startswith(b'"') and raw.endswith(b'"'):
        raw = re.sub(rb"\\([0-7]{3}|.)", _unescape, raw[1:-1])
    return raw.decode("utf-8", "backslashreplace")


def _unescape(match: re.Match[bytes]) -> bytes:
    code: bytes = match[1]
    if len(code) == 3:
        return bytes([int(code, 8) & 0xFF])
    return {b"n": b"\n", b"t": b"\t", b"r": b"\r"}.get(code, code)


def _subject(preamble: bytes) -> str:
    mail = message_from_bytes(preamble.split(b"\n", 1)[1])
    text = str(make_header(decode_header(mail.get("Subject", ""))))
    return re.sub(r"^\[PATCH[^\]]*\]\s*", "", " ".join(text.split()))
