"""`make lint` finds every fault of patches/ in one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.build.patchset import HEAD, make_series, text
from tools.build.series.lint import check_patches, check_test

BASE = {"vllm/a.py": text(), "vllm/_version.py": text(5), "vllm/platforms/__init__.py": text(5)}
CHANGE = {"vllm/a.py": text(line7="seven")}


@pytest.fixture
def tests_root(tmp_path: Path) -> Path:
    root = tmp_path / "tests"
    (root / "patches").mkdir(parents=True)
    (root / "patches/test_lease.py").write_text(
        "def test_lease_is_kept():\n    pass\n\n\n"
        "class TestLease:\n    async def test_inside(self):\n        pass\n"
    )
    return root


def problems_with(tmp_path: Path, tests_root: Path, old: bytes, new: bytes) -> list[str]:
    """The problems of a good patch in which `old` was replaced by `new`."""
    patches = make_series(tmp_path / "p", BASE, ("fixes/one.patch", CHANGE))
    file = patches / "fixes/one.patch"
    assert old in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(old, new))
    return check_patches(patches, tests_root)


def test_a_complete_patch_has_no_problem(tmp_path: Path, tests_root: Path) -> None:
    patches = make_series(tmp_path / "p", BASE, ("hooks/one.patch", CHANGE))
    assert check_patches(patches, tests_root) == []


def test_series_and_files_must_match_both_ways(tmp_path: Path, tests_root: Path) -> None:
    patches = make_series(tmp_path / "p", BASE, ("fixes/one.patch", CHANGE))
    (patches / "fixes/one.patch").rename(patches / "fixes/two.patch")
    assert check_patches(patches, tests_root) == [
        "patches/series lists fixes/one.patch, which is not there",
        "patches/fixes/two.patch is not listed in patches/series",
    ]


def test_a_missing_series_is_a_problem(tmp_path: Path, tests_root: Path) -> None:
    (problem,) = check_patches(tmp_path, tests_root)
    assert "cannot read" in problem and "series" in problem


@pytest.mark.parametrize(
    "key",
    ["Subject", "Why", "Why-not-overlay", "Forwarded", "Origin", "Drop-when", "Test"],
)
def test_each_header_is_needed(tmp_path: Path, tests_root: Path, key: str) -> None:
    old = f"\n{key}: ".encode() if key != "Subject" else b"Subject: "
    new = f"\nX{key}: ".encode() if key != "Subject" else b"XSubject: "
    assert problems_with(tmp_path, tests_root, old, new) == [
        f"patches/fixes/one.patch has no header {key}"
    ]


def test_an_empty_header_and_one_to_fill_in_are_both_reported(
    tmp_path: Path, tests_root: Path
) -> None:
    found = problems_with(
        tmp_path, tests_root, b"Forwarded: no\nOrigin: vendor", b"Forwarded:\nOrigin: FILL IN"
    )
    assert found == [
        "patches/fixes/one.patch: header Forwarded is empty",
        "patches/fixes/one.patch: header Origin still says 'FILL IN'",
    ]


def test_a_patch_without_a_separator_is_a_problem(tmp_path: Path, tests_root: Path) -> None:
    (problem,) = problems_with(tmp_path, tests_root, b"\n---\n", b"\n")
    assert "no line `---`" in problem


def test_a_broken_diff_does_not_hide_broken_headers(tmp_path: Path, tests_root: Path) -> None:
    patches = make_series(tmp_path / "p", BASE, ("fixes/one.patch", CHANGE))
    head = HEAD.replace(b"Origin: vendor\n", b"")
    (patches / "fixes/one.patch").write_bytes(head + b"no diff\n")
    found = check_patches(patches, tests_root)
    assert "patches/fixes/one.patch has no header Origin" in found
    assert len(found) == 2


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ("tests/patches/test_lease.py::test_lease_is_kept", ""),
        ("tests/patches/test_lease.py::test_lease_is_kept[one-1]", ""),
        ("tests/patches/test_lease.py::TestLease::test_inside", ""),
        ("tests/patches/test_lease.py::test_inside", "no test function test_inside"),
        ("tests/patches/test_lease.py::TestOther::test_inside", "no class TestOther"),
        ("tests/patches/test_lease.py::TestLease", "no test function TestLease"),
        ("tests/patches/test_none.py::test_x", "does not exist"),
        ("tests/patches/test_lease.py", "does not have the form"),
        ("patches/test_lease.py::test_lease_is_kept", "does not have the form"),
        ("tests/../tests/patches/test_lease.py::test_lease_is_kept", "unsafe path"),
    ],
)
def test_the_named_test_must_exist(tests_root: Path, entry: str, wrong: str) -> None:
    found = check_test(entry, tests_root)
    assert wrong in found and bool(found) == bool(wrong)


def test_all_of_several_tests_are_checked(tmp_path: Path, tests_root: Path) -> None:
    good = b"tests/patches/test_lease.py::test_lease_is_kept"
    found = problems_with(
        tmp_path, tests_root, good, good + b"\n tests/patches/test_a.py::b tests/c.py::d"
    )
    assert found == [
        "patches/fixes/one.patch: header Test: tests/patches/test_a.py does not exist",
        "patches/fixes/one.patch: header Test: tests/c.py does not exist",
    ]


def test_a_test_file_that_does_not_parse_is_a_problem(tmp_path: Path, tests_root: Path) -> None:
    (tests_root / "broken.py").write_text("def (:\n")
    assert "not valid Python" in check_test("tests/broken.py::test_x", tests_root)


def test_a_patch_lives_in_one_of_three_folders(tmp_path: Path, tests_root: Path) -> None:
    patches = make_series(tmp_path / "p", BASE, ("other/one.patch", CHANGE), ("two.patch", CHANGE))
    found = check_patches(patches, tests_root)
    assert "patches/other/one.patch is not in one of backports/, fixes/, hooks/" in found
    assert "patches/two.patch is not in one of backports/, fixes/, hooks/" in found


@pytest.mark.parametrize(
    "path",
    ["vllm/_version.py", "vllm/platforms/__init__.py", "vllm-1.0.dist-info/METADATA"],
)
def test_a_protected_file_is_a_problem(tmp_path: Path, tests_root: Path, path: str) -> None:
    change = {path: text(5, line3="three")}
    patches = make_series(tmp_path / "p", {path: text(5)}, ("fixes/one.patch", change))
    assert check_patches(patches, tests_root) == [
        f"patches/fixes/one.patch touches {path}, which no patch may change"
    ]


def test_a_registry_host_is_a_problem(tmp_path: Path, tests_root: Path) -> None:
    host = b"pyp" + b"i.org"
    found = problems_with(tmp_path, tests_root, b"+seven", b"+https://" + host + b"/simple")
    assert found[0].endswith("names the package registry " + host.decode())
