"""A patch file has one canonical form, and a file in another form is noticed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.unit.build.patchset import HEAD, make_series, snapshot, text
from tools.build.errors import ConfigError, OutputError, PatchError
from tools.build.series.export import canonical_diff, check_exports, re_export, write_patches
from tools.build.series.scratch import Scratch

BASE = {"vllm/a.py": text(), "vllm/b.py": b"\xff one\r\ntwo\r\nthree\r\n"}


def plain_git_diff(folder: Path, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bytes:
    """What a person gets from git's command line in a checkout."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

    def git(*args: str) -> bytes:
        return subprocess.run(
            ["git", "-c", "core.autocrlf=false", *args],
            cwd=folder,
            env=env,
            check=True,
            capture_output=True,
        ).stdout

    folder.mkdir()
    git("init", "--quiet")
    for tree in (before, after):
        for path, data in tree.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        git("add", "--all")
        if tree is before:
            git("-c", "user.name=x", "-c", "user.email=x@y", "commit", "--quiet", "-m", "base")
    return git("diff", "--cached", "--full-index", "--no-renames", "-U3")


def test_the_canonical_form_is_what_git_diff_prints(tmp_path: Path) -> None:
    after = {
        "vllm/a.py": text(line3="3", line20="", line30="30\n30a"),
        "vllm/b.py": b"\xff one\r\nTWO\r\nthree\r\nfour",
        "vllm/new/c.py": b"def f():\n    return 1\n",
    }
    assert canonical_diff(BASE, after) == plain_git_diff(tmp_path / "r", BASE, after)


def test_the_users_git_settings_do_not_change_the_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"vllm/a.py": b"one\n\nthree\n"}
    after = {"vllm/a.py": b"one\n\n3\n"}
    wanted = canonical_diff(before, after)
    settings = tmp_path / ".gitconfig"
    settings.write_text(
        "[diff]\nnoprefix = true\nmnemonicPrefix = true\ncontext = 9\nalgorithm = patience\n"
        "suppressBlankEmpty = true\n"
        "[core]\nautocrlf = true\nabbrev = 4\n[color]\nui = always\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=0")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert canonical_diff(before, after) == wanted


def test_exporting_again_gives_the_same_bytes_and_keeps_the_headers(tmp_path: Path) -> None:
    patches = make_series(
        tmp_path / "p",
        BASE,
        ("fixes/one.patch", {"vllm/a.py": text(line3="3")}),
        ("fixes/two.patch", {"vllm/a.py": text(line3="3", line5="5"), "vllm/n.py": b"a\nb\n"}),
    )
    exported = re_export(patches, BASE.get, "vllm 1.0")
    assert exported == {name: (patches / name).read_bytes() for name in exported}
    assert all(data.startswith(HEAD) for data in exported.values())
    assert check_exports(patches, BASE.get, "vllm 1.0") == []


def test_an_edited_hunk_heading_is_named_with_its_line(tmp_path: Path) -> None:
    patches = make_series(tmp_path / "p", BASE, ("fixes/one.patch", {"vllm/a.py": text(line9="9")}))
    file = patches / "fixes/one.patch"
    file.write_bytes(file.read_bytes().replace(b"@@ line 5\n", b"@@ line 4\n"))
    assert check_exports(patches, BASE.get, "vllm 1.0") == [
        "patches/fixes/one.patch is not as exported: line 14: expected "
        "'@@ -6,7 +6,7 @@ line 5\\n', found '@@ -6,7 +6,7 @@ line 4\\n'"
    ]


def test_more_context_than_three_lines_is_not_canonical(tmp_path: Path) -> None:
    after = {"vllm/a.py": text(line9="9")}
    patches = make_series(tmp_path / "p", BASE, ("fixes/one.patch", after))
    file = patches / "fixes/one.patch"
    edited = file.read_bytes().replace(b"@@ -6,7 +6,7 @@", b"@@ -5,8 +5,8 @@")
    file.write_bytes(edited.replace(b" line 6\n", b" line 5\n line 6\n"))
    assert len(check_exports(patches, BASE.get, "vllm 1.0")) == 1


def test_an_export_of_a_patch_that_does_not_apply_is_refused(tmp_path: Path) -> None:
    patches = make_series(tmp_path / "p", BASE, ("fixes/one.patch", {"vllm/a.py": text(line9="9")}))
    with pytest.raises(PatchError, match=r"fixes/one\.patch does not apply"):
        check_exports(patches, {"vllm/a.py": b"new\n" + text()}.get, "vllm 1.0")


def test_a_failed_write_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    patches = make_series(tmp_path / "p", BASE, ("fixes/one.patch", {"vllm/a.py": text(line9="9")}))
    (patches / "hooks").write_bytes(b"a file where a folder is needed")
    before = snapshot(patches)
    with pytest.raises(OutputError, match="cannot write"):
        write_patches(patches, {"fixes/one.patch": b"x", "hooks/two.patch": b"y"}, b"")
    assert snapshot(patches) == before


def test_a_scratch_repository_never_reuses_a_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"")
    with pytest.raises(ConfigError, match="is not empty"):
        Scratch.create(tmp_path)


def test_a_missing_git_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="git is not installed"):
        Scratch.create(tmp_path / "repo")


def test_a_failing_git_command_says_what_git_said(tmp_path: Path) -> None:
    repo = Scratch.create(tmp_path / "repo")
    with pytest.raises(Exception, match=r"git rev-parse failed") as caught:
        repo.git("rev-parse", "--verify", "nothing")
    assert "Needed a single revision" in str(caught.value)
