"""What a release wheel holds for patches to change, and how upstream.toml pins it."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import parse_wheel_filename

from tools.build.errors import ConfigError
from tools.build.hashing import sha256_file

_LIMIT = 2 << 20


def wheel_tree(wheel: Path) -> dict[str, bytes]:
    """The text files below vllm/ in a wheel: what a patch can change."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = (
                info
                for info in archive.infolist()
                if info.filename.startswith("vllm/")
                and not info.is_dir()
                and info.file_size < _LIMIT
            )
            tree = {info.filename: archive.read(info) for info in members}
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"error: cannot read {wheel}: {error}", next_step="fetch the wheel again"
        ) from error
    text = {path: data for path, data in tree.items() if b"\0" not in data}
    if not text:
        raise ConfigError(f"error: {wheel} has no text file below vllm/: not a vLLM wheel")
    return text


def base_rows(wheels: Iterable[Path]) -> str:
    """`[[base]]` rows for upstream.toml, measured on downloaded wheels."""
    rows: list[str] = []
    for wheel in wheels:
        name, version, _, tags = parse_wheel_filename(wheel.name)
        platform = sorted(tag.platform for tag in tags)[0]
        arch = next((arch for arch in ("x86_64", "aarch64") if platform.endswith(arch)), "unknown")
        fields = {
            "device": '"cpu"' if str(name).endswith("-cpu") else '"cuda"',
            "arch": f'"{arch}"',
            "name": f'"{name}"',
            "version": f'"{version}"',
            "file": f'"{wheel.name}"',
            "size": str(wheel.stat().st_size),
            "sha256": f'"{sha256_file(wheel)}"',
            "wheel_tag": f'"{_wheel_tag(wheel)}"',
        }
        rows.append("\n".join(("[[base]]", *(f"{key} = {text}" for key, text in fields.items()))))
    return "\n\n".join(rows) + "\n"


def _wheel_tag(wheel: Path) -> str:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if n.endswith(".dist-info/WHEEL"))
            text = archive.read(member).decode("utf-8")
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise ConfigError(f"error: cannot read the WHEEL file of {wheel}") from error
    return " ".join(re.findall(r"^Tag: *(\S+)", text, re.MULTILINE))
