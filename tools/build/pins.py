"""Read upstream.toml: which base releases we build from, and what the result is called."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

from tools.build.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEVICES = ("cuda", "cpu")
ARCHES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Base:
    """One pinned release wheel of upstream."""

    device: str
    arch: str
    name: str
    version: str
    file: str
    size: int
    sha256: str
    wheel_tag: str

    @property
    def dist_info(self) -> str:
        """Name of the folder that holds the base's metadata, without a slash."""
        return f"{self.name.replace('-', '_')}-{self.version}.dist-info"

    @property
    def tag(self) -> str:
        """The compatibility tag in the file name, which is the true one."""
        return self.file.removesuffix(".whl").split("-", 2)[2]


@dataclass(frozen=True)
class Sdist:
    """The pinned source distribution whose tests and benchmarks are fetched at run time."""

    name: str
    version: str
    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Label:
    """Name and version that the output wheel carries."""

    name: str
    version: str

    @property
    def dist_info(self) -> str:
        return f"{self.name}-{self.version}.dist-info"

    def wheel_name(self, tag: str) -> str:
        return f"{self.name}-{self.version}-{tag}.whl"


@dataclass(frozen=True)
class Pins:
    """All of upstream.toml."""

    path: Path
    name: str
    version: str
    revision: int
    bases: tuple[Base, ...]
    sdists: tuple[Sdist, ...]

    def base(self, device: str, arch: str, version: str | None = None) -> Base:
        """The pinned base for a device and architecture, or ConfigError listing what there is."""
        wanted = version or self.version
        for base in self.bases:
            if (base.device, base.arch, base.version) == (device, arch, wanted):
                return base
        known = ", ".join(f"{b.version}/{b.device}/{b.arch}" for b in self.bases)
        raise ConfigError(
            f"error: no pinned base for version {wanted}, DEVICE={device}, ARCH={arch}",
            [("file", str(self.path)), ("known", known or "none")],
            "choose one of the known ones, or pin another release: docs/patches.md, 'refresh'",
        )

    def sdist(self, version: str | None = None) -> Sdist:
        """The pinned source distribution of a version."""
        wanted = version or self.version
        for sdist in self.sdists:
            if sdist.version == wanted:
                return sdist
        raise ConfigError(
            f"error: no pinned source distribution for version {wanted}",
            [("file", str(self.path))],
            "add an [[sdist]] row with name, version, file, size and sha256",
        )

    def label(self, base: Base) -> Label:
        """The output's name and version.

        vLLM picks its CPU platform when the installed version contains "cpu", so that
        substring is in the CPU label and must never be in another.
        """
        local = f"bidir.{self.revision}"
        if base.device == "cpu":
            local = f"cpu.{local}"
        return Label(self.name, f"{base.version}+{local}")


def read_pins(path: Path) -> Pins:
    """Read and check upstream.toml; ConfigError lists every problem found in it."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"error: cannot read {path}: {error.strerror}", next_step="run from the checkout"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"error: {path} is not valid TOML: {error}") from error

    problems: list[str] = []
    dist = data.get("distribution", {})
    if not isinstance(dist, dict):
        dist = {}
    for key, kind in (("name", str), ("version", str), ("revision", int)):
        if not isinstance(dist.get(key), kind):
            problems.append(f"[distribution] {key} must be a {kind.__name__}")
    bases = tuple(
        base for row in _rows(data, "base", problems) if (base := _base(row, problems)) is not None
    )
    sdists = tuple(
        Sdist(**row)
        for row in _rows(data, "sdist", problems)
        if _complete(row, Sdist, "sdist", problems)
    )
    if problems:
        raise ConfigError(
            f"error: {path} has {len(problems)} problem(s)",
            [("found", problem) for problem in problems],
            "mend the rows named above; each needs name, version, file, size and sha256",
        )
    return Pins(path, dist["name"], dist["version"], dist["revision"], bases, sdists)


def _rows(data: dict[str, Any], key: str, problems: list[str]) -> list[dict[str, Any]]:
    rows = data.get(key, [])
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        return rows
    problems.append(f"{key} must be a list of tables ([[{key}]])")
    return []


def _complete(row: dict[str, Any], kind: type, where: str, problems: list[str]) -> bool:
    wanted = {field.name: int if field.name == "size" else str for field in fields(kind)}
    name = f"[[{where}]] {row.get('file', '?')}"
    wrong = [
        f"{name}: {key} must be a {type_.__name__}"
        for key, type_ in wanted.items()
        if not isinstance(row.get(key), type_)
    ]
    wrong += [f"{name}: unknown key {key}" for key in row if key not in wanted]
    if not wrong and not _is_sha256(row["sha256"]):
        wrong.append(f"{name}: sha256 must be 64 lower-case hex digits")
    problems += wrong
    return not wrong


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _base(row: dict[str, Any], problems: list[str]) -> Base | None:
    if not _complete(row, Base, "base", problems):
        return None
    base = Base(**row)
    if base.device not in DEVICES or base.arch not in ARCHES:
        problems.append(
            f"{base.file}: device must be one of {DEVICES}, arch one of {ARCHES}; "
            f"found {base.device!r}, {base.arch!r}"
        )
        return None
    name, version, _, _ = parse_wheel_filename(base.file)
    if (name, str(version)) != (base.name, base.version):
        problems.append(f"{base.file}: file name says {name} {version}, row says otherwise")
        return None
    return base
