"""Base releases come from the cache, a file, or pip; what is not the pinned one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.build.tiny import Tiny, make_tiny
from tools.build.errors import FetchError
from tools.build.fetch import cache_folder, fetch
from tools.build.pins import Base, read_pins


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """pip finds the tiny bases in a folder, and asks no index."""
    made = make_tiny(tmp_path)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.cuda.parent))
    return made


def get(tiny: Tiny, said: list[str], local: Path | None = None) -> Path:
    pins = read_pins(tiny.checkout.pins)
    base: Base = pins.base("cuda", "x86_64")
    return fetch(pins, base, tiny.root / "cache", local, said.append)


def test_a_release_is_downloaded_once_and_then_comes_from_the_cache(tiny: Tiny) -> None:
    said: list[str] = []
    path = get(tiny, said)
    assert path.read_bytes() == tiny.cuda.read_bytes()
    assert len(said) == 1
    assert get(tiny, said) == path
    assert len(said) == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_damaged_cached_file_is_fetched_again(tiny: Tiny) -> None:
    said: list[str] = []
    path = get(tiny, said)
    path.write_bytes(path.read_bytes()[:100])
    assert get(tiny, said).read_bytes() == tiny.cuda.read_bytes()
    assert any("cut short; fetching it again" in line for line in said)


def test_another_file_under_the_pinned_name_is_refused(tiny: Tiny) -> None:
    data = bytearray(tiny.cuda.read_bytes())
    data[50] ^= 1
    tiny.cuda.write_bytes(data)
    with pytest.raises(FetchError, match="another file") as caught:
        get(tiny, [])
    assert "Expected" in str(caught.value) and "Got" in str(caught.value)
    assert list((tiny.root / "cache").iterdir()) == []


def test_without_network_the_error_says_how_to_give_the_file(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(FetchError, match=r"cannot fetch vllm==0\.29\.0") as caught:
        get(tiny, [])
    assert "UPSTREAM_WHEEL=path" in str(caught.value)
    assert list((tiny.root / "cache").iterdir()) == []


def test_an_unwritable_cache_names_the_variable(tiny: Tiny) -> None:
    (tiny.root / "cache").write_text("a file in the way")
    with pytest.raises(FetchError, match="cannot write to the cache folder") as caught:
        get(tiny, [])
    assert "BIDIR_CACHE" in str(caught.value)


def test_the_cache_folder_follows_its_variables() -> None:
    assert cache_folder({"BIDIR_CACHE": "/x"}) == Path("/x")
    assert cache_folder({"XDG_CACHE_HOME": "/y"}) == Path("/y/vllm-bidir")
