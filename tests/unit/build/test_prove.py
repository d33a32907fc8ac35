"""prove finds whatever is wrong with a finished wheel, whoever spoiled it."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.build.tiny import SERVER, Tiny, make_tiny
from tools.build.errors import ProofError
from tools.build.hashing import record_hash
from tools.build.manifest import Manifest, read_manifest
from tools.build.prove import prove

INFO = "vllm-0.29.0+bidir.1.dist-info"
Files = dict[str, bytes]


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    made = make_tiny(tmp_path)
    made.add_patch("fixes/port.patch", "vllm/server.py", SERVER, SERVER + b"# more\n")
    return made


def test_what_was_built_is_proven_again_from_its_manifest(tiny: Tiny) -> None:
    built = tiny.build()
    assert prove(built.wheel, tiny.cuda, read_manifest(built.manifest)) == built.proof


def spoil(tiny: Tiny, change: Callable[[Files], None]) -> tuple[Path, Manifest]:
    """Rebuild the wheel's zip with changed members, and let the manifest's file hash follow."""
    built = tiny.build()
    manifest = read_manifest(built.manifest)
    with zipfile.ZipFile(built.wheel) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        files = {name: archive.read(name) for name in infos}
    change(files)
    with zipfile.ZipFile(built.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name, (2026, 9, 9, 1, 53, 34))
            known = infos.get(name)
            info.external_attr = known.external_attr if known else 0o100644 << 16
            info.compress_type = known.compress_type if known else zipfile.ZIP_STORED
            archive.writestr(info, data)
    data = built.wheel.read_bytes()
    size, sha256 = len(data), hashlib.sha256(data).hexdigest()
    return built.wheel, replace(manifest, size=size, sha256=sha256)


def honest(files: Files, name: str, data: bytes) -> None:
    """Change a member and make RECORD agree, as a careful forger would."""
    record = f"{INFO}/RECORD"
    row = f"{name},{record_hash(hashlib.sha256(data).digest())},{len(data)}"
    lines = [line for line in files[record].decode().split("\n") if line.split(",")[0] != name]
    files[record] = "\n".join([row, *lines]).encode()
    files[name] = data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.__setitem__("vllm/lib.so", b"x"), ["hash and size that RECORD gives"]),
        (lambda f: honest(f, "vllm/lib.so", b"x"), ["vllm/lib.so differs from the base"]),
        (lambda f: honest(f, "vllm/server.py", b"x = 1\n"), ["not the content that the manifest"]),
        (lambda f: honest(f, "vllm/extra.py", b""), ["neither the base's nor claimed"]),
        (lambda f: honest(f, f"{INFO}/extra.json", b""), ["neither the base's nor claimed"]),
        (lambda f: f.__setitem__("vllm/extra.py", b""), ["in the wheel but not in RECORD"]),
        (lambda f: f.pop("vllm/lib.so"), ["not in the wheel", "lib.so of the base is missing"]),
        (lambda f: f.pop(f"{INFO}/RECORD"), ["no RECORD"]),
        (
            lambda f: honest(f, f"{INFO}/WHEEL", b"Wheel-Version: 1.0\nTag: py3-none-any\n"),
            ["WHEEL Tag is"],
        ),
        (
            lambda f: honest(f, f"{INFO}/METADATA", b"Name: vllm\nVersion: 0.29.0\n"),
            ["METADATA Version is"],
        ),
        (lambda f: honest(f, "other-1.dist-info/METADATA", b""), ["dist-info folder(s)"]),
        (
            lambda f: f.__setitem__(f"{INFO}/RECORD", f[f"{INFO}/RECORD"] + b"a,b\n"),
            ["fields instead of 3"],
        ),
        (
            lambda f: f.__setitem__(
                f"{INFO}/RECORD", f[f"{INFO}/RECORD"] + b"vllm/lib.so,sha256=x,1\n"
            ),
            ["RECORD lists vllm/lib.so more than once"],
        ),
    ],
)
def test_each_kind_of_damage_is_found(
    tiny: Tiny, change: Callable[[Files], None], words: list[str]
) -> None:
    wheel, manifest = spoil(tiny, change)
    with pytest.raises(ProofError) as caught:
        prove(wheel, tiny.cuda, manifest)
    for word in words:
        assert word in str(caught.value)


def test_a_wheel_that_changed_after_its_manifest_is_found(tiny: Tiny) -> None:
    built = tiny.build()
    data = bytearray(built.wheel.read_bytes())
    data[len(data) // 2] ^= 1
    built.wheel.write_bytes(data)
    with pytest.raises(ProofError, match="instead of"):
        prove(built.wheel, tiny.cuda, read_manifest(built.manifest))


def test_another_base_is_found(tiny: Tiny) -> None:
    built = tiny.build()
    with pytest.raises(ProofError, match="not the base that the manifest names"):
        prove(built.wheel, tiny.cpu, read_manifest(built.manifest))


def test_a_cuda_label_with_cpu_in_it_is_found(tiny: Tiny) -> None:
    """vLLM would take the CPU platform on a GPU host."""
    built = tiny.build("cpu")
    manifest = read_manifest(built.manifest)
    lying = replace(manifest, base=replace(manifest.base, device="cuda"))
    with pytest.raises(ProofError, match="wrong platform"):
        prove(built.wheel, tiny.cpu, lying)
