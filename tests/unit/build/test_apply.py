"""The applier takes the exact bytes at the exact line, all or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.build.tiny import HEADERS, git_diff
from tools.build.apply import apply_series
from tools.build.errors import ConfigError, PatchError
from tools.build.patch import Patch, parse_patch

BODY = b"".join(b"line %d\n" % k for k in range(40))
CHANGED = BODY.replace(b"line 20\n", b"line twenty\n")
PATH = "vllm/server.py"


@pytest.fixture
def patch(tmp_path: Path) -> Patch:
    return make(tmp_path, PATH, BODY, CHANGED)


def make(scratch: Path, path: str, before: bytes | None, after: bytes) -> Patch:
    return parse_patch("fixes/x.patch", HEADERS.encode() + git_diff(scratch, path, before, after))


def apply(patches: list[Patch], files: dict[str, bytes]) -> dict[str, bytes]:
    return {k: v.data for k, v in apply_series(patches, files.get, "vllm 0.29.0").items()}


def test_a_patch_applies_at_its_line(patch: Patch) -> None:
    assert apply([patch], {PATH: BODY}) == {PATH: CHANGED}


def test_patches_of_one_file_build_on_each_other(tmp_path: Path, patch: Patch) -> None:
    last = CHANGED + b"more\n"
    second = make(tmp_path, PATH, CHANGED, last)
    assert apply([patch, second], {PATH: BODY}) == {PATH: last}
    with pytest.raises(PatchError):
        apply([second, patch], {PATH: BODY})


@pytest.mark.parametrize(
    ("found", "diagnosis"),
    [
        (b"new first line\n" + BODY, "moved by +1"),
        (BODY.replace(b"line 0\n", b"", 1), "moved by -1"),
        (CHANGED, "applied already"),
        (b"other\n" + CHANGED, "applied already?"),
        (BODY.replace(b"line 20\n", b"line 20  # near\n"), "one line differs"),
        (b"".join(b"strange %d\n" % k for k in range(40)), "no block in this file looks like it"),
        (b"line 0\n", "the file ends at line 1"),
        (BODY.replace(b"\n", b"\r\n"), "found"),
    ],
)
def test_anything_but_the_exact_place_is_refused_with_a_diagnosis(
    patch: Patch, found: bytes, diagnosis: str
) -> None:
    with pytest.raises(PatchError, match=r"does not apply to vllm 0\.29\.0") as caught:
        apply([patch], {PATH: found})
    assert diagnosis in str(caught.value)
    assert PATH in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_like_looking_block_elsewhere_is_never_taken(tmp_path: Path) -> None:
    """Two equal functions: the patch changes the second, and the release has lost the first."""
    block = b"def f():\n    a = 1\n    b = 2\n    c = 3\n    return a\n"
    twice = block + b"# gap\n" * 9 + block
    patched = block + b"# gap\n" * 9 + block.replace(b"b = 2", b"b = 9")
    patch = make(tmp_path, PATH, twice, patched)
    with pytest.raises(PatchError, match="the same block stands at line"):
        apply([patch], {PATH: block + b"# gap\n" * 3 + block})


def test_a_file_that_differs_outside_the_hunks_is_refused(patch: Patch) -> None:
    with pytest.raises(PatchError, match="differs outside the patch's hunks"):
        apply([patch], {PATH: BODY.replace(b"line 39\n", b"line 99\n")})


def test_a_hunk_that_disagrees_with_the_index_line_is_refused(patch: Patch) -> None:
    broken = parse_patch("fixes/x.patch", patch.raw.replace(b"line twenty", b"line TWENTY"))
    with pytest.raises(PatchError, match="hunks and `index` line disagree"):
        apply([broken], {PATH: BODY})


def test_a_missing_file_is_named(patch: Patch) -> None:
    with pytest.raises(PatchError, match="no such file in the base"):
        apply([patch], {})


def test_crlf_is_kept(tmp_path: Path) -> None:
    before = BODY.replace(b"\n", b"\r\n")
    after = before.replace(b"line 3\r\n", b"line three\r\n")
    assert apply([make(tmp_path, PATH, before, after)], {PATH: before}) == {PATH: after}


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"a\nb", b"a\nc"), (b"a\nb", b"a\nb\n"), (b"a\nb\n", b"a\nb"), (b"a\n", b"\xff\x85\x0c\n")],
)
def test_a_missing_last_newline_and_odd_bytes_survive(
    tmp_path: Path, before: bytes, after: bytes
) -> None:
    assert apply([make(tmp_path, PATH, before, after)], {PATH: before}) == {PATH: after}


def test_a_patch_may_add_a_file_but_not_over_another(tmp_path: Path) -> None:
    patch = make(tmp_path, "vllm/new.py", None, b"new = 1\n")
    assert apply([patch], {}) == {"vllm/new.py": b"new = 1\n"}
    with pytest.raises(PatchError, match="the base has this file already"):
        apply([patch], {"vllm/new.py": b""})


def test_a_patch_may_add_an_empty_file(tmp_path: Path) -> None:
    patch = make(tmp_path, "vllm/empty/__init__.py", None, b"")
    assert apply([patch], {}) == {"vllm/empty/__init__.py": b""}


def test_nothing_is_applied_when_a_later_file_fails(tmp_path: Path, patch: Patch) -> None:
    files = {PATH: BODY}
    second = make(tmp_path, "vllm/gone.py", b"a\n", b"b\n")
    with pytest.raises(PatchError, match=r"vllm/gone\.py"):
        apply([patch, second], files)
    assert files == {PATH: BODY}


@pytest.mark.parametrize(
    "path", ["vllm/_version.py", "vllm/platforms/__init__.py", "vllm-0.29.0.dist-info/METADATA"]
)
def test_protected_files_cannot_be_patched(tmp_path: Path, path: str) -> None:
    patch = make(tmp_path, path, b"a\n", b"b\n")
    with pytest.raises(PatchError, match="no patch may change"):
        apply([patch], {path: b"a\n"})


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (b"b/vllm/server.py", b"b/../server.py", "not the same file|unsafe path"),
        (b"vllm/server.py", b"../etc/passwd", "unsafe path"),
        (b"vllm/server.py", b"/etc/passwd", "unsafe path|not the same file"),
        (b"vllm/server.py", b"C:/x.py", "unsafe path"),
        (b"\n---\n", b"\n", "no line `---`"),
        (b"Why: a test\n", b"Why: a test\nWhy: again\n", "repeats a header"),
        (b"Why: a test\n", b"nonsense\n", "not a `Key: value` line"),
        (b"index ", b"similarity index 90%\nrename from x\nindex ", "rename from"),
        (b"index ", b"old mode 100644\nnew mode 100755\nindex ", "old mode"),
        (b"@@ -18,7", b"@@ -18,9", "not a well-formed diff"),
        (b"diff --git", b"junk\ndiff --git", "belongs to no file"),
    ],
)
def test_a_malformed_patch_is_refused(patch: Patch, old: bytes, new: bytes, complaint: str) -> None:
    assert old in patch.raw
    with pytest.raises(ConfigError, match=complaint):
        parse_patch("fixes/x.patch", patch.raw.replace(old, new))


def test_short_blob_ids_are_refused(patch: Patch) -> None:
    short = patch.raw.replace(patch.files[0].before.encode(), patch.files[0].before[:9].encode())
    with pytest.raises(ConfigError, match="short blob id"):
        parse_patch("fixes/x.patch", short)
