"""Invariants of the real CPU wheel: what is in it, and that it installs and leaves cleanly."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tools.build.archive import WheelReader
from tools.build.errors import ProofError
from tools.build.fetch import fetch
from tools.build.hashing import sha256_file
from tools.build.installed import check_installed, site_folders
from tools.build.manifest import Manifest
from tools.build.pipeline import Checkout, Options, build, select
from tools.build.prove import prove
from tools.build.series.export import check_exports


def run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_building_twice_gives_the_same_bytes(
    wheel: Path, checkout: Checkout, cpu_options: Options, tmp_path: Path
) -> None:
    again = build(checkout, replace(cpu_options, out=tmp_path), lambda line: None)
    assert sha256_file(again.wheel) == sha256_file(wheel)


def test_pip_wheel_gives_the_same_bytes_as_make(
    wheel: Path, checkout: Checkout, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), "."]
    subprocess.run(
        command,
        cwd=checkout.root,
        env={**os.environ, "DEVICE": "cpu", "ARCH": "x86_64"},
        check=True,
    )
    assert sha256_file(next(tmp_path.glob("*.whl"))) == sha256_file(wheel)


def test_the_wheel_is_proven_from_its_manifest(
    wheel: Path, manifest: Manifest, checkout: Checkout, cpu_options: Options
) -> None:
    pins, base, _ = select(checkout, cpu_options)
    base_wheel = fetch(pins, base, cpu_options.cache, cpu_options.upstream_wheel, print)
    proof = prove(wheel, base_wheel, manifest)
    assert proof.patched > 0
    assert proof.untouched > 2900


def test_version_file_and_platform_file_are_as_released(wheel: Path, manifest: Manifest) -> None:
    """vllm.__version__ enters NIXL's compatibility hash: we must pair with a stock 0.29.0 node."""
    changed = {claim.path for claim in manifest.files}
    assert not changed & {"vllm/_version.py", "vllm/platforms/__init__.py"}
    with zipfile.ZipFile(wheel) as archive:
        assert b"0.29.0" in archive.read("vllm/_version.py")


def test_each_patched_file_carries_a_change_note(wheel: Path, manifest: Manifest) -> None:
    with zipfile.ZipFile(wheel) as archive:
        patched = [claim for claim in manifest.files if claim.change == "patched"]
        assert patched
        for claim in patched:
            head = archive.read(claim.path)[:1000].decode()
            assert f"# Modified by the vllm-bidir distribution ({', '.join(claim.patches)})" in head


def test_the_bill_of_materials_is_valid_cyclonedx(wheel: Path, manifest: Manifest) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = f"vllm-{manifest.version}.dist-info/sboms/vllm-bidir.cdx.json"
        bill = archive.read(name).decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill) is None


def test_patches_are_exported_canonically(checkout: Checkout, cpu_options: Options) -> None:
    """A patch edited by hand, or exported with other flags, does not survive a re-export."""
    pins, base, _ = select(checkout, cpu_options)
    path = fetch(pins, base, cpu_options.cache, cpu_options.upstream_wheel, print)
    with WheelReader(path) as reader:
        assert check_exports(checkout.patches, reader.read, f"{base.name} {base.version}") == []


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_it_installs_runs_and_leaves_nothing_behind(
    tool: str, wheel: Path, manifest: Manifest, venv: Path
) -> None:
    python = venv / "bin/python"
    folder = site_folders(str(python))[0]
    before = {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    pip = (python, "-m", "pip") if tool == "pip" else (sys.executable, "-m", "uv", "pip")
    where = () if tool == "pip" else ("--python", python)
    run(*pip, "install", "-q", "--no-deps", *where, wheel)
    assert check_installed((folder,), manifest).version == manifest.version
    # vllm's requirements are those of the running test environment.
    (folder / "requirements.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    shown = run(venv / "bin/vllm", "--version")
    assert re.search(rf"^{re.escape(manifest.version)}$", shown, re.MULTILINE), shown
    (folder / "requirements.pth").unlink()
    run(*pip, "uninstall", "-q", *(("-y",) if tool == "pip" else ()), *where, "vllm")
    after = {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    assert {path for path in after - before if path.is_file()} == set()
    with pytest.raises(ProofError, match="no vllm is installed"):
        check_installed((folder,), None)


def test_the_test_environment_runs_what_was_built(manifest: Manifest) -> None:
    check_installed(site_folders(sys.executable), manifest)
