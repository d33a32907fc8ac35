"""Rewrite the base's dist-info for our name, version and tag.

METADATA is edited by header line and never re-serialised: a round trip through an e-mail
parser would change more than the lines that we mean.
"""

from __future__ import annotations

import configparser
import re

from packaging.requirements import InvalidRequirement, Requirement

from tools.build.errors import ConfigError, OverlayError
from tools.build.pins import Base, Label

GENERATOR = "vllm-bidir tools.build"
NOTICE_FILE = "NOTICE"
# Their index builds do not load beside a CPU torch, and nothing that a CPU server does needs them.
MEDIA_EXTRA = "torch-media"
# What of ours needs more than vLLM does: the router's state in Redis.
EXTRAS = {"redis-state": ("redis>=6",)}
_MEDIA = ("torchvision", "torchaudio", "torchcodec")


def relabel_metadata(base: Base, label: Label, data: bytes) -> bytes:
    """METADATA with our name and version, a License-File line for NOTICE, our extras, and, for the
    CPU wheel, requirements that a package index can satisfy."""
    head, blank, body = data.partition(b"\n\n")
    lines = head.decode("utf-8").split("\n")
    lines = _replace_one(lines, "Name", base.name, label.name)
    lines = _replace_one(lines, "Version", base.version, label.version)
    if base.device == "cpu":
        lines = _cpu_requirements(base, lines)
    for extra, requirements in EXTRAS.items():
        needed = [_for_extra(Requirement(one), extra) for one in requirements]
        lines = _with_extra(lines, extra, needed)
    last = max((k for k, line in enumerate(lines) if _key(line) == "License-File"), default=None)
    if last is None:
        raise ConfigError(f"error: METADATA of {base.file} has no License-File line")
    lines.insert(last + 1, f"License-File: {NOTICE_FILE}")
    return "\n".join(lines).encode("utf-8") + blank + body


def relabel_wheel(base: Base, data: bytes) -> bytes:
    """WHEEL with the file name's tag, and with us as its generator."""
    lines = data.decode("utf-8").split("\n")
    lines = _replace_one(lines, "Tag", base.wheel_tag, base.tag)
    lines = [f"Generator: {GENERATOR}" if _key(line) == "Generator" else line for line in lines]
    return "\n".join(lines).encode("utf-8")


def merge_entry_points(base_text: str, ours_text: str) -> str:
    """Entry points of the base and ours; a name that the base has already is an error."""
    base, ours = _entry_points("the base", base_text), _entry_points("overlay", ours_text)
    clashes = [
        f"[{group}] {name}"
        for group, names in ours.items()
        for name in names
        if name in base.get(group, {})
    ]
    if clashes:
        raise OverlayError(
            "error: overlay/entry_points.txt repeats entry points of the base",
            [("found", clash) for clash in clashes],
            "choose another name",
        )
    merged = {group: base.get(group, {}) | ours.get(group, {}) for group in sorted({*base, *ours})}
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {names[name]}\n" for name in sorted(names))
        for group, names in merged.items()
    )


def _entry_points(where: str, text: str) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise OverlayError(f"error: entry points of {where} cannot be read: {error}") from error
    return {group: dict(parser.items(group)) for group in parser.sections()}


def _key(line: str) -> str:
    match = re.match(r"([A-Za-z-]+):", line)
    return match[1] if match else ""


def _replace_one(lines: list[str], key: str, expected: str, value: str) -> list[str]:
    at = [k for k, line in enumerate(lines) if _key(line) == key]
    if len(at) != 1 or lines[at[0]] != f"{key}: {expected}":
        raise ConfigError(
            f"error: the base's {key} header is not as expected",
            [
                ("expected", f"one line `{key}: {expected}`"),
                ("found", "\n".join(lines[k] for k in at) or "none"),
            ],
            "mend the row of this base in upstream.toml",
        )
    return [*lines[: at[0]], f"{key}: {value}", *lines[at[0] + 1 :]]


def _cpu_requirements(base: Base, lines: list[str]) -> list[str]:
    """torch without its `+cpu` label, which no ordinary index serves; media packages optional."""
    plain: list[str] = []
    media: list[str] = []
    pins = 0
    for line in lines:
        requirement = _requirement(base, line)
        if requirement is None:
            plain.append(line)
        elif requirement.name in _MEDIA:
            media.append(_for_extra(requirement, MEDIA_EXTRA))
        elif requirement.name == "torch" and str(requirement.specifier).endswith("+cpu"):
            pins += 1
            plain.append(line.replace("+cpu", "", 1))
        else:
            plain.append(line)
    if pins != 1 or len(media) != len(_MEDIA):
        raise ConfigError(
            f"error: requirements of {base.file} are not as expected",
            [
                ("expected", f"one torch==…+cpu and one each of {', '.join(_MEDIA)}"),
                ("found", f"{pins} torch==…+cpu and {len(media)} of the others"),
            ],
            "adapt tools/build/relabel.py to this release",
        )
    return _with_extra(plain, MEDIA_EXTRA, media)


def _with_extra(lines: list[str], extra: str, needed: list[str]) -> list[str]:
    """The headers with one more extra, behind all requirements that there are."""
    last = max(
        (k for k, line in enumerate(lines) if _key(line) in ("Requires-Dist", "Provides-Extra")),
        default=max(k for k, line in enumerate(lines) if _key(line) == "Version"),
    )
    return [*lines[: last + 1], f"Provides-Extra: {extra}", *needed, *lines[last + 1 :]]


def _requirement(base: Base, line: str) -> Requirement | None:
    if _key(line) != "Requires-Dist":
        return None
    try:
        return Requirement(line.split(":", 1)[1].strip())
    except InvalidRequirement as error:
        raise ConfigError(f"error: METADATA of {base.file}: {line!r}: {error}") from error


def _for_extra(requirement: Requirement, extra: str) -> str:
    marker = f'extra == "{extra}"'
    if requirement.marker is not None:
        marker = f"({requirement.marker}) and {marker}"
    return f"Requires-Dist: {requirement.name}{requirement.specifier}; {marker}"
