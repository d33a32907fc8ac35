"""Get a pinned base release: from the cache, from a local file, or with pip."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.build.errors import FetchError
from tools.build.pins import Base, Pins
from tools.build.verify import verify_file

Say = Callable[[str], None]


def cache_folder(environ: dict[str, str]) -> Path:
    """Where downloads are kept: BIDIR_CACHE, else below XDG_CACHE_HOME or ~/.cache."""
    if own := environ.get("BIDIR_CACHE"):
        return Path(own)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-bidir"


def fetch(pins: Pins, base: Base, cache: Path, local: Path | None, say: Say) -> Path:
    """Path of the base wheel, whose size and sha256 are those of the pin.

    A cached file is verified each time it is used; a damaged one is fetched again.
    """
    if local is not None:
        _verify_local(pins, base, local)
        return local
    path = cache / base.file
    if path.exists():
        try:
            verify_file(base, path)
        except FetchError as error:
            say(f"{error.subject.removeprefix('error: ')}; fetching it again")
        else:
            return path
    say(f"downloading {base.file} ({base.size / 1e6:.0f} MB)")
    requirement = f"{base.name}=={base.version} --hash=sha256:{base.sha256}\n"
    with _download(requirement, ["--require-hashes"], base.tag, cache) as folder:
        found = Path(folder) / base.file
        if not found.exists():
            names = ", ".join(sorted(p.name for p in Path(folder).iterdir()))
            raise FetchError(
                "error: pip fetched another file than the pinned one",
                [("expected", base.file), ("found", names or "nothing")],
                "check the index that pip is set up with",
            )
        verify_file(base, found)
        found.replace(path)
    return path


def fetch_unpinned(name: str, version: str, tag: str, cache: Path, say: Say) -> Path:
    """A release that is not pinned yet, for `refresh`; its hash is what the caller makes of it."""
    file = f"{name.replace('-', '_')}-{version}-{tag}.whl"
    path = cache / file
    if path.exists():
        return path
    say(f"downloading {file}, which is not pinned")
    with _download(f"{name}=={version}\n", [], tag, cache) as folder:
        wheels = sorted(Path(folder).glob("*.whl"))
        if not wheels:
            raise FetchError(f"error: the index has no wheel of {name} {version} for {tag}")
        path = cache / wheels[0].name
        wheels[0].replace(path)
    return path


def _verify_local(pins: Pins, base: Base, local: Path) -> None:
    try:
        verify_file(base, local)
    except FetchError as error:
        others = [other for other in pins.bases if other != base and other.file == local.name]
        if others:
            other = others[0]
            raise FetchError(
                error.subject,
                error.details,
                f"{local.name} is pinned for DEVICE={other.device} ARCH={other.arch}: say so",
            ) from error
        raise


def _download(
    requirement: str, options: list[str], tag: str, cache: Path
) -> tempfile.TemporaryDirectory[str]:
    """Run `pip download` into a fresh folder beside the cache's files, so that a rename is atomic.

    The tag is given explicitly: nothing of the wheel is executed, so that any machine may fetch
    any architecture's.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=cache, prefix=".partial-")
    except OSError as error:
        raise FetchError(
            f"error: cannot write to the cache folder {cache}: {error.strerror}",
            next_step="set BIDIR_CACHE to a folder that can be written",
        ) from error
    _, abi, platform = tag.split("-")
    pins_file = Path(folder.name) / "requirement.txt"
    pins_file.write_text(requirement, encoding="utf-8")
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--implementation", "cp", "--abi", abi, "--platform", platform),
        *("--python-version", "3.12", "--dest", folder.name, "-r", str(pins_file), *options),
    ]
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    try:
        done = subprocess.run(
            command,
            stdout=sys.stderr.fileno() if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet},
            check=False,
        )
    except BaseException:
        folder.cleanup()
        raise
    pins_file.unlink()
    if done.returncode:
        folder.cleanup()
        raise _explain(requirement.split(" ")[0].strip(), cache, done.stderr)
    return folder


def _explain(what: str, cache: Path, stderr: str) -> FetchError:
    lines = [
        line.strip()
        for line in stderr.splitlines()
        if line.strip() and not line.startswith("WARNING: Location")
    ]
    tail = "\n".join(line[:300] for line in lines[-6:])
    if "DO NOT MATCH THE HASHES" in stderr:
        wanted = [line for line in lines if line.startswith(("Expected", "Got"))]
        return FetchError(
            f"error: the index serves another file for {what} than the pinned one",
            [("found", "\n".join(wanted) or tail)],
            "do not use it; check the index that pip is set up with",
        )
    if "No space left" in stderr:
        return FetchError(
            f"error: no space left in {cache} while fetching {what}",
            [("found", tail)],
            "free space, or set BIDIR_CACHE to another folder",
        )
    return FetchError(
        f"error: cannot fetch {what}",
        [("found", tail or "pip failed without a word")],
        "check network and pip's index settings, or give the file: UPSTREAM_WHEEL=path",
    )
