"""The source distribution comes from the cache, a file or an index, and only what is wanted of it
is written."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools.build.errors import FetchError, OutputError
from tools.build.pins import Sdist
from tools.build.sdist import extract, fetch_sdist

FILE = "tiny-1.0.tar.gz"
QUICK = (0.0, 0.0)


def archive(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return gzip.compress(raw.getvalue(), mtime=0)


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


DATA = archive(
    ("tiny-1.0/pyproject.toml", b"[project]\n"),
    ("tiny-1.0/tests/test_a.py", b"def test_a(): pass\r\n"),
    ("tiny-1.0/tests_more/test_b.py", b""),
    ("tiny-1.0/tiny/__init__.py", b""),
    link("tiny-1.0/tiny/away", "/etc", tarfile.SYMTYPE),
)


def pin(data: bytes = DATA) -> Sdist:
    return Sdist("tiny", "1.0", FILE, len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip's settings name, and no index."""
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / FILE).write_bytes(DATA)
    _only(monkeypatch, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(folder))
    return folder


def _only(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


Answer = Callable[[BaseHTTPRequestHandler, int], None]


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Answer]]:
    """An index on the loopback; the list holds how it answers for the file, request by request."""
    answers: list[Answer] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith(FILE):
                answers.pop(0)(self, len(DATA))
            else:
                send(self, 200, f'<a href="/files/{FILE}">{FILE}</a>'.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing: the test's output is for failures."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/simple"
        _only(monkeypatch, PIP_INDEX_URL=url)
        yield answers
        server.shutdown()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, length: int = -1) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "text/html")
    handler.send_header("Content-Length", str(len(body) if length < 0 else length))
    handler.end_headers()
    handler.wfile.write(body)


def whole(handler: BaseHTTPRequestHandler, size: int) -> None:
    send(handler, 200, DATA)


def busy(handler: BaseHTTPRequestHandler, size: int) -> None:
    send(handler, 503, b"busy")


def cut_short(handler: BaseHTTPRequestHandler, size: int) -> None:
    send(handler, 200, DATA[: size // 2], size)
    handler.close_connection = True


def test_it_is_fetched_once_without_being_built(links: Path, tmp_path: Path) -> None:
    said: list[str] = []
    path = fetch_sdist(pin(), tmp_path / "cache", None, said.append)
    assert path.read_bytes() == DATA
    assert len(said) == 1
    (links / FILE).unlink()
    assert fetch_sdist(pin(), tmp_path / "cache", None, said.append) == path
    assert len(said) == 1
    assert [p.name for p in path.parent.iterdir()] == [FILE]


def test_a_damaged_cached_file_is_fetched_again(links: Path, tmp_path: Path) -> None:
    said: list[str] = []
    path = fetch_sdist(pin(), tmp_path / "cache", None, said.append)
    path.write_bytes(DATA[:-1])
    assert fetch_sdist(pin(), tmp_path / "cache", None, said.append).read_bytes() == DATA
    assert any("fetching it again" in line for line in said)


def test_another_file_than_the_pinned_one_never_enters_the_cache(
    links: Path, tmp_path: Path
) -> None:
    other = bytearray(DATA)
    other[20] ^= 1
    (links / FILE).write_bytes(other)
    with pytest.raises(FetchError, match="not the pinned file") as caught:
        fetch_sdist(pin(), tmp_path / "cache", None, print)
    assert pin().sha256 in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_local_file_is_used_where_it_is_and_must_be_the_pinned_one(tmp_path: Path) -> None:
    local = tmp_path / "mine.tar.gz"
    local.write_bytes(DATA)
    assert fetch_sdist(pin(), tmp_path / "cache", local, print) == local
    assert not (tmp_path / "cache").exists()
    local.write_bytes(DATA[:10])
    with pytest.raises(FetchError, match="cut short"):
        fetch_sdist(pin(), tmp_path / "cache", local, print)


@pytest.mark.parametrize("failure", [busy, cut_short])
def test_an_index_that_fails_once_is_asked_again(
    failure: Answer, index: list[Answer], tmp_path: Path
) -> None:
    index[:] = [failure, whole]
    said: list[str] = []
    path = fetch_sdist(pin(), tmp_path, None, said.append, QUICK)
    assert path.read_bytes() == DATA
    assert any(line.startswith("try 1 failed") for line in said)


def test_an_index_that_keeps_failing_is_one_error_that_says_what_to_do(
    index: list[Answer], tmp_path: Path
) -> None:
    index[:] = [busy, busy, busy]
    with pytest.raises(FetchError, match=f"cannot fetch {FILE}") as caught:
        fetch_sdist(pin(), tmp_path, None, print, QUICK)
    assert "503" in str(caught.value)
    assert "UPSTREAM_SDIST=path" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_without_network_the_error_says_how_to_give_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only(monkeypatch, PIP_INDEX_URL="http://127.0.0.1:1/simple")
    with pytest.raises(FetchError, match="cannot fetch") as caught:
        fetch_sdist(pin(), tmp_path, None, print, QUICK)
    assert "UPSTREAM_SDIST=path" in str(caught.value)


def test_an_index_without_the_release_is_asked_only_once(links: Path, tmp_path: Path) -> None:
    (links / FILE).unlink()
    said: list[str] = []
    with pytest.raises(FetchError, match="cannot fetch") as caught:
        fetch_sdist(pin(), tmp_path / "cache", None, said.append, QUICK)
    assert f"no index offers {FILE}" in str(caught.value)
    assert len(said) == 1


def saved(tmp_path: Path, data: bytes = DATA) -> Path:
    path = tmp_path / FILE
    path.write_bytes(data)
    return path


def test_only_what_is_wanted_is_extracted_byte_for_byte(tmp_path: Path) -> None:
    extract(saved(tmp_path), ["tests", "pyproject.toml"], tmp_path / "tree")
    files = sorted(p for p in (tmp_path / "tree").rglob("*") if p.is_file())
    assert [p.relative_to(tmp_path / "tree").as_posix() for p in files] == [
        "pyproject.toml",
        "tests/test_a.py",
    ]
    assert files[1].read_bytes() == b"def test_a(): pass\r\n"


@pytest.mark.parametrize(
    "member",
    [
        link("tiny-1.0/tests/away", "/etc", tarfile.SYMTYPE),
        link("tiny-1.0/tests/twin", "tiny-1.0/pyproject.toml", tarfile.LNKTYPE),
        link("tiny-1.0/tests/pipe", "", tarfile.FIFOTYPE),
        ("tiny-1.0/tests/../../../out", b""),
        ("/tiny-1.0/tests/out", b""),
    ],
    ids=["symlink", "hard link", "pipe", "dots", "absolute"],
)
def test_a_member_that_could_lead_out_is_refused_and_nothing_is_left(
    member: tarfile.TarInfo | tuple[str, bytes], tmp_path: Path
) -> None:
    # An absolute name has "/" as its first part, so that the wanted path is one level deeper.
    wanted = "tiny-1.0/tests" if isinstance(member, tuple) and member[0][0] == "/" else "tests"
    path = saved(tmp_path, archive(("tiny-1.0/pyproject.toml", b""), member))
    with pytest.raises(FetchError, match="never extracted"):
        extract(path, [wanted], tmp_path / "tree")
    assert [p.name for p in tmp_path.iterdir()] == [FILE]


def test_a_wanted_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="lacks what is wanted") as caught:
        extract(saved(tmp_path), ["tests", "benchmarks/multi_turn"], tmp_path / "tree")
    assert "benchmarks/multi_turn" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [FILE]


def test_a_file_that_is_no_archive_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="not a readable archive"):
        extract(saved(tmp_path, b"no archive"), ["tests"], tmp_path / "tree")


def test_a_folder_with_something_in_it_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "mine").write_text("")
    with pytest.raises(OutputError, match="cannot extract"):
        extract(saved(tmp_path), ["tests"], tmp_path / "tree")
    assert (tmp_path / "tree" / "mine").exists()
