"""Get the pinned source distribution, and take the wanted folders out of it.

It is found by `unearth`, the finder behind PDM, under pip's own settings: `pip download` would run
the release's build just to read its metadata, which needs torch and a compiler.
"""

from __future__ import annotations

import ast
import logging
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tools.build.errors import FetchError, OutputError
from tools.build.pins import Sdist
from tools.build.verify import verify_bytes

Say = Callable[[str], None]

#: Seconds to wait before each further try; an index that fails is mostly well again soon.
PAUSES = (1.0, 3.0, 9.0)

GIVE_FILE = "check network and pip's index settings, or give the file: UPSTREAM_SDIST=path"


def fetch_sdist(
    pin: Sdist,
    cache: Path,
    local: Path | None,
    say: Say,
    pauses: Sequence[float] = PAUSES,
) -> Path:
    """Path of the source distribution, whose size and sha256 are those of the pin.

    A cached file is verified each time it is used; a damaged one is fetched again. A `local` file
    is used where it is, and never mended. FetchError says expected, found and what to do.
    """
    if local is not None:
        verify_bytes(local, pin.size, pin.sha256)
        return local
    path = cache / pin.file
    if path.exists():
        try:
            verify_bytes(path, pin.size, pin.sha256)
        except FetchError as error:
            say(f"{error.subject.removeprefix('error: ')}; fetching it again")
        else:
            return path
    say(f"downloading {pin.file} ({pin.size / 1e6:.0f} MB)")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".partial-") as folder:
            partial = Path(folder) / pin.file
            _download(pin, partial, say, pauses)
            verify_bytes(partial, pin.size, pin.sha256)
            partial.replace(path)
    except OSError as error:
        raise FetchError(
            f"error: cannot write {pin.file} into the cache folder {cache}: {error.strerror}",
            next_step="free space, or set BIDIR_CACHE to a folder that can be written",
        ) from error
    return path


def extract(archive: Path, wanted: Sequence[str], into: Path) -> None:
    """Write the wanted files and folders of a source distribution to `into`, all or nothing.

    `wanted` are paths below the archive's one top folder, which is left out. Only plain files and
    folders are written, so that nothing can lead out of `into`, which must not exist yet.
    """
    paths = [PurePosixPath(path).parts for path in wanted]
    missing = set(paths)
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=into.parent, prefix=".partial-") as folder,
            tarfile.open(archive) as tar,
        ):
            root = Path(folder) / "tree"
            root.mkdir()
            for member in tar:
                inside = PurePosixPath(member.name).parts[1:]
                below = {path for path in paths if inside[: len(path)] == path}
                if below:
                    missing -= below
                    _write(archive, tar, member, root.joinpath(*inside))
            if not missing:
                root.replace(into)
    except tarfile.TarError as error:
        raise FetchError(
            f"error: {archive} is not a readable archive: {error}", next_step=GIVE_FILE
        ) from error
    except OSError as error:
        raise OutputError(
            f"error: cannot extract {archive.name} to {into}: {error.strerror or error}",
            next_step="free space, or choose a folder that can be written and does not exist",
        ) from error
    if missing:
        raise FetchError(
            f"error: {archive} lacks what is wanted from it",
            [("expected", "/".join(path)) for path in sorted(missing)],
            "it is the source distribution of another release; mend its row in upstream.toml",
        )


def _write(archive: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    parts = PurePosixPath(member.name).parts
    if ".." in parts or member.name.startswith("/") or "\\" in member.name:
        problem = "its path leads out of the archive"
    elif member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    elif not member.isreg() or (source := tar.extractfile(member)) is None:
        problem = "it is neither a file nor a folder"
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        with source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
        path.chmod(0o755 if member.mode & 0o100 else 0o644)
        return
    raise FetchError(
        f"error: {archive} has a member that is never extracted",
        [("found", f"{member.name}: {problem}")],
        "do not use it; check where it came from",
    )


@dataclass(frozen=True)
class _PipSettings:
    """What pip's configuration files and PIP_* variables say about indexes."""

    index: tuple[str, ...]
    extra: tuple[str, ...]
    links: tuple[str, ...]
    trusted: tuple[str, ...]
    cert: str | None
    no_index: bool


def _pip_settings() -> _PipSettings:
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FetchError(
            "error: cannot read pip's settings",
            [("found", done.stderr.strip()[-300:])],
            GIVE_FILE,
        )
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        found[key] = str(ast.literal_eval(value))

    def words(name: str) -> tuple[str, ...]:
        # pip's order: a variable, then its section for the command, then the one for all.
        values = (found.get(f"{section}.{name}") for section in (":env:", "download", "global"))
        return tuple(next((value for value in values if value), "").split())

    return _PipSettings(
        index=words("index-url")[:1],
        extra=words("extra-index-url"),
        links=tuple(link for link in words("find-links") if "://" in link or Path(link).exists()),
        trusted=words("trusted-host"),
        cert=next(iter(words("cert")), None),
        no_index=words("no-index")[:1] in {("1",), ("true",), ("True",), ("yes",), ("on",)},
    )


def _finder(pin: Sdist, settings: _PipSettings) -> Any:
    from unearth import PackageFinder
    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers import PyPIClient

    if settings.no_index and not settings.links:
        raise FetchError(
            f"error: cannot fetch {pin.file}: pip is set to use no index, and no find-links",
            next_step=GIVE_FILE,
        )
    if settings.cert and not Path(settings.cert).is_file():
        raise FetchError(
            f"error: pip's setting `cert` names no file: {settings.cert}", next_step=GIVE_FILE
        )
    verify = ssl.create_default_context(cafile=settings.cert) if settings.cert else True
    session: Any = PyPIClient(trusted_hosts=settings.trusted, verify=verify)
    session.auth = MultiDomainBasicAuth(index_urls=settings.index + settings.extra)
    first = settings.links if settings.no_index else ()
    # Without a source, the finder takes its own default index, as pip does.
    finder = PackageFinder(
        session=session, index_urls=settings.index, find_links=first, no_binary=[pin.name]
    )
    if not settings.no_index:
        for url in settings.extra:
            finder.add_index_url(url)
        for link in settings.links:
            finder.add_find_links(link)
    return finder


class _Warnings(logging.Handler):
    """Keeps what the finder only logs: an index that does not answer is no error to it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _download(pin: Sdist, path: Path, say: Say, pauses: Sequence[float]) -> None:
    import httpx2

    finder = _finder(pin, _pip_settings())
    problem = ""
    with finder.session:
        for number, pause in enumerate((*pauses, None), 1):
            warnings = _Warnings()
            logger = logging.getLogger("unearth")
            logger.addHandler(warnings)
            try:
                found = finder.find_matches(f"{pin.name}=={pin.version}")
                link = next((m.link for m in found if m.link.filename == pin.file), None)
                if link is not None:
                    _stream(finder.session, link.normalized, path)
                    return
                problem = "\n".join(warnings.lines) or f"no index offers {pin.file}"
            except httpx2.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            finally:
                logger.removeHandler(warnings)
            if pause is None or problem.startswith("no index"):
                break
            say(f"try {number} failed ({problem.splitlines()[-1][:200]}); again in {pause:.0f} s")
            time.sleep(pause)
    raise FetchError(f"error: cannot fetch {pin.file}", [("found", problem[-600:])], GIVE_FILE)


def _stream(session: Any, url: str, path: Path) -> None:
    with session.get_stream(url) as response, path.open("wb") as file:
        response.raise_for_status()
        for chunk in response.iter_bytes(1 << 20):
            file.write(chunk)
