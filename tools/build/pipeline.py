"""The build, from pins to proof, and where its inputs lie in a checkout."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.build.archive import WheelReader
from tools.build.errors import ConfigError, OutputError
from tools.build.fetch import cache_folder, fetch
from tools.build.hashing import sha256_file
from tools.build.manifest import (
    Manifest,
    file_claims,
    make_manifest,
    manifest_path,
    patch_claims,
)
from tools.build.overlay import read_entry_points, read_overlay
from tools.build.patch import read_patches
from tools.build.pins import Base, Label, Pins, read_pins
from tools.build.plan import SBOM_NAME, Member, Sources, plan_members
from tools.build.prove import Proof, prove
from tools.build.relabel import relabel_metadata, relabel_wheel
from tools.build.sbom import make_sbom
from tools.build.verify import verify_wheel
from tools.build.write import timestamp, write_wheel

Say = Callable[[str], None]


@dataclass(frozen=True)
class Checkout:
    """The folders of this repository that a build reads."""

    root: Path

    @property
    def pins(self) -> Path:
        return self.root / "upstream.toml"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def overlay(self) -> Path:
        return self.root / "overlay"


@dataclass(frozen=True)
class Options:
    """What to build. `version` is the base release, None for the one that upstream.toml names."""

    device: str = "cuda"
    arch: str = "x86_64"
    version: str | None = None
    upstream_wheel: Path | None = None
    out: Path = Path("dist")
    cache: Path = Path(".cache")
    source_date_epoch: str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], out: Path) -> Options:
        """DEVICE, ARCH, VERSION, UPSTREAM_WHEEL, BIDIR_CACHE, SOURCE_DATE_EPOCH; empty is unset."""
        wheel = environ.get("UPSTREAM_WHEEL")
        return cls(
            device=environ.get("DEVICE") or "cuda",
            arch=environ.get("ARCH") or "x86_64",
            version=environ.get("VERSION") or None,
            upstream_wheel=Path(wheel) if wheel else None,
            out=out,
            cache=cache_folder(dict(environ)),
            source_date_epoch=environ.get("SOURCE_DATE_EPOCH") or None,
        )


@dataclass(frozen=True)
class Built:
    """A proven wheel in its final place, with its manifest beside it."""

    wheel: Path
    manifest: Path
    proof: Proof


def select(checkout: Checkout, options: Options) -> tuple[Pins, Base, Label]:
    """The pinned base that the options ask for, and the label that its output gets."""
    pins = read_pins(checkout.pins)
    base = pins.base(options.device, options.arch, options.version)
    return pins, base, pins.label(base)


def build(checkout: Checkout, options: Options, say: Say) -> Built:
    """Build, prove and only then publish the wheel and its manifest into `options.out`."""
    pins, base, label = select(checkout, options)
    base_path = fetch(pins, base, options.cache, options.upstream_wheel, say)
    with WheelReader(base_path) as reader:
        verify_wheel(base, reader)
        patches = read_patches(checkout.patches)
        sources = Sources(
            patches=patches,
            overlay=read_overlay(checkout.overlay, reader.members),
            entry_points=read_entry_points(checkout.overlay),
            notice=_notice(checkout),
        )
        epoch = timestamp(base, reader, options.source_date_epoch)
        members = plan_members(base, label, reader, sources)
        bill = make_sbom(base, label, patches, _overlay_digest(sources), epoch)
        sbom = Member(f"{label.dist_info}/{SBOM_NAME}", "added", None, bill)
        members = (*members, sbom)
        claims = file_claims(reader, members)
        with _partial(options.out) as folder:
            wheel = Path(folder) / label.wheel_name(base.tag)
            say(f"writing {wheel.name}: {len(patches)} patches, {len(members)} members")
            write_wheel(wheel, base, label, reader, members, epoch)
            output = (wheel.stat().st_size, sha256_file(wheel))
            manifest = make_manifest(base, label, output, patch_claims(patches), claims)
            say("proving it")
            proof = prove(wheel, base_path, manifest)
            return _publish(wheel, manifest, proof, options.out)


def metadata_of(checkout: Checkout, options: Options, say: Say) -> tuple[Label, dict[str, bytes]]:
    """Label and dist-info texts of the wheel that `build` would write, for PEP 517's metadata."""
    pins, base, label = select(checkout, options)
    with WheelReader(fetch(pins, base, options.cache, options.upstream_wheel, say)) as reader:
        verify_wheel(base, reader)
        texts = {
            "METADATA": relabel_metadata(
                base, label, reader.read(f"{base.dist_info}/METADATA") or b""
            ),
            "WHEEL": relabel_wheel(base, reader.read(f"{base.dist_info}/WHEEL") or b""),
        }
    return label, texts


def _notice(checkout: Checkout) -> bytes:
    path = checkout.root / "NOTICE"
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"error: cannot read {path}: {error.strerror}") from error


def _overlay_digest(sources: Sources) -> str:
    digest = hashlib.sha256()
    for path, data in sources.overlay.items():
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _partial(out: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder inside `out`, so that publishing is a rename and a failure leaves nothing."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=out, prefix=".partial-")
    except OSError as error:
        raise OutputError(
            f"error: cannot write to {out}: {error.strerror}",
            next_step="choose another folder with --out",
        ) from error


def _publish(wheel: Path, manifest: Manifest, proof: Proof, out: Path) -> Built:
    listing = manifest_path(wheel)
    try:
        listing.write_text(manifest.to_json(), encoding="utf-8")
        final, final_listing = out / wheel.name, out / listing.name
        wheel.replace(final)
        listing.replace(final_listing)
    except OSError as error:
        raise OutputError(
            f"error: cannot write to {out}: {error.strerror}",
            next_step="free space or choose another folder with --out",
        ) from error
    return Built(final, final_listing, proof)
