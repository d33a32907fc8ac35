"""An upstream pull request's diff becomes a patch of ours, or nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.unit.build.patchset import diff_bytes, make_series, snapshot, text
from tools.build.apply import apply_series
from tools.build.errors import BuildError, ConfigError, PatchError
from tools.build.patch import read_patches, read_series
from tools.build.series.export import check_exports
from tools.build.series.importer import Imported, import_diff
from tools.build.series.lint import check_patches

BASE = {"vllm/a.py": text(), "vllm/b.py": text(12), "vllm/crlf.py": b"one\r\ntwo\r\nthree\r\n"}
MAIL = b"""From 0123456789abcdef0123456789abcdef01234567 Mon Sep 17 00:00:00 2001
From: A Person <a@example.invalid>
Date: Mon, 1 Jan 2026 00:00:00 +0000
Subject: [PATCH] Send the last
 =?utf-8?q?chunk_=C3=A9arly?=

It was late.
---
 vllm/a.py | 2 +-
 1 file changed, 1 insertion(+), 1 deletion(-)

"""


def published(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bytes:
    """A diff as GitHub shows it: blob ids cut to seven digits."""
    lines = []
    for line in diff_bytes(before, after).split(b"\n"):
        if line.startswith(b"index "):
            ids, *mode = line[6:].split(b" ")
            short = b"..".join(blob[:7] for blob in ids.split(b".."))
            line = b"index " + b" ".join((short, *mode))
        lines.append(line)
    return b"\n".join(lines)


class Desk:
    """A patches folder, a base and a place for downloaded diffs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.patches = make_series(
            folder / "patches", BASE, ("fixes/one.patch", {"vllm/b.py": text(12, line11="eleven")})
        )

    def take(self, data: bytes, file: str = "40186.diff", name: str | None = None) -> Imported:
        path = self.folder / file
        path.write_bytes(data)
        return import_diff(path, self.patches, BASE.get, "vllm 1.0", self.said.append, name)

    def result(self) -> dict[str, bytes]:
        changed = apply_series(read_patches(self.patches), BASE.get, "vllm 1.0")
        return {path: change.data for path, change in changed.items()}

    def refuse(self, data: bytes, kind: type[BuildError], **kwargs: str) -> str:
        """The message of a refusal, after checking that it wrote nothing."""
        before = snapshot(self.patches)
        with pytest.raises(kind) as caught:
            self.take(data, **kwargs)
        assert snapshot(self.patches) == before
        return str(caught.value)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_diff_becomes_a_full_index_patch_at_the_end_of_the_series(desk: Desk) -> None:
    new = text(line7="seven")
    done = desk.take(published({"vllm/a.py": BASE["vllm/a.py"]}, {"vllm/a.py": new}))
    assert done.name == "backports/pr-40186.patch"
    assert read_series(desk.patches) == ("fixes/one.patch", "backports/pr-40186.patch")
    assert desk.result()["vllm/a.py"] == new
    assert done.notes == () and done.dropped == ()
    assert check_exports(desk.patches, BASE.get, "vllm 1.0") == []


def test_what_is_known_stands_in_the_headers_and_lint_refuses_the_rest(desk: Desk) -> None:
    done = desk.take(published({"vllm/a.py": text()}, {"vllm/a.py": text(line7="x")}), "40186.diff")
    headers = read_patches(desk.patches)[-1].headers
    assert headers["Origin"] == "upstream PR #40186"
    assert done.to_fill == ("Subject", "Why", "Why-not-overlay", "Test")
    problems = check_patches(desk.patches, desk.folder / "tests")
    for key in done.to_fill:
        assert f"patches/{done.name}: header {key} still says 'FILL IN'" in problems
    assert "make lint refuses" in desk.said[-1]


def test_paths_that_a_wheel_does_not_have_are_dropped_and_listed(desk: Desk) -> None:
    before = {
        "vllm/a.py": text(),
        "vllm/only_in_git.py": text(5),
        "tests/t.py": text(5),
        "csrc/k.cu": text(5),
        "setup.py": text(5),
        "docs/gone.md": b"bye\n",
    }
    after = {path: data.replace(b"line 3", b"three") for path, data in before.items()}
    del after["docs/gone.md"]
    done = desk.take(published(before, after))
    assert {item.path: item.reason for item in done.dropped} == {
        "csrc/k.cu": "outside vllm/",
        "docs/gone.md": "outside vllm/",
        "setup.py": "outside vllm/",
        "tests/t.py": "outside vllm/",
        "vllm/only_in_git.py": "vllm 1.0 has no vllm/only_in_git.py",
    }
    assert done.files == ("vllm/a.py",)
    assert "dropped  csrc/k.cu (outside vllm/)" in desk.said[-1]


def test_dropped_renames_binaries_and_quoted_names_do_not_stop_an_import(desk: Desk) -> None:
    outside = (
        b"diff --git a/docs/a.md b/docs/b.md\nsimilarity index 100%\n"
        b"rename from docs/a.md\nrename to docs/b.md\n"
        b'diff --git "a/docs/\\303\\251.png" "b/docs/\\303\\251.png"\n'
        b"index 1111111..2222222 100644\nGIT binary patch\nliteral 2\nJc${Nk0000\n\n"
        b"diff --git a/tools/x.sh b/tools/x.sh\nold mode 100644\nnew mode 100755\n"
    )
    done = desk.take(outside + published({"vllm/a.py": text()}, {"vllm/a.py": text(line2="x")}))
    assert [item.path for item in done.dropped] == ["docs/b.md", "docs/é.png", "tools/x.sh"]


def test_a_file_that_the_diff_adds_below_vllm_is_kept(desk: Desk) -> None:
    done = desk.take(published({}, {"vllm/new/c.py": b"x = 1\ny = 2\n"}))
    assert done.files == ("vllm/new/c.py",)
    assert desk.result()["vllm/new/c.py"] == b"x = 1\ny = 2\n"


def test_crlf_lines_stay_crlf(desk: Desk) -> None:
    after = {"vllm/crlf.py": b"one\r\nTWO\r\nthree\r\n"}
    desk.take(published({"vllm/crlf.py": BASE["vllm/crlf.py"]}, after))
    assert desk.result()["vllm/crlf.py"] == after["vllm/crlf.py"]


def test_a_missing_newline_at_the_end_is_carried_over(desk: Desk) -> None:
    after = {"vllm/a.py": text()[:-1], "vllm/new.py": b"only"}
    desk.take(published({"vllm/a.py": text()}, after))
    assert {path: desk.result()[path] for path in after} == after


def test_hunks_of_an_lf_diff_do_not_fit_a_crlf_file(desk: Desk) -> None:
    message = desk.refuse(
        published({"vllm/crlf.py": b"one\ntwo\nthree\n"}, {"vllm/crlf.py": b"one\n2\nthree\n"}),
        PatchError,
    )
    assert 'expected  "one"' in message and 'found     "one\\r"' in message


def test_a_mail_gives_its_subject_and_may_end_in_gits_signature(desk: Desk) -> None:
    diff = published({"vllm/a.py": text()}, {"vllm/a.py": text(line40="")})
    done = desk.take(MAIL + diff + b"-- \n2.39.5\n\n", "0001-send.patch")
    assert done.name == "backports/0001-send.patch"
    assert read_patches(desk.patches)[-1].headers["Subject"] == "Send the last chunk éarly"
    assert desk.result()["vllm/a.py"] == text(39)


def test_a_mail_with_several_commits_is_refused(desk: Desk) -> None:
    diff = published({"vllm/a.py": text()}, {"vllm/a.py": text(line2="x")})
    message = desk.refuse(MAIL + diff + b"-- \n2.39.5\n\n" + MAIL + diff, ConfigError)
    assert "holds 2 commits" in message and ".diff" in message


def test_it_applies_on_top_of_the_series_and_notes_the_other_blob(desk: Desk) -> None:
    done = desk.take(published({"vllm/b.py": text(12)}, {"vllm/b.py": text(12, line2="two")}))
    (note,) = done.notes
    assert "vllm/b.py: the diff was made on blob" in note
    assert "changed by fixes/one.patch" in note and "hunks fit exactly" in note
    assert desk.result()["vllm/b.py"] == text(12, line2="two", line11="eleven")


def test_a_diff_that_contradicts_its_own_blob_ids_is_refused(desk: Desk) -> None:
    diff = published({"vllm/a.py": text()}, {"vllm/a.py": text(line7="seven")})
    message = desk.refuse(diff.replace(b"+seven", b"+SEVEN"), PatchError)
    assert "hunks and `index` line disagree" in message


def test_a_moved_block_is_named_with_where_it_stands(desk: Desk) -> None:
    older = text()[len(b"line 1\n") :]
    diff = published({"vllm/a.py": older}, {"vllm/a.py": older.replace(b"line 20\n", b"x\n")})
    message = desk.refuse(diff, PatchError)
    assert "vllm/a.py, hunk 1 of 1, line 16" in message
    assert "moved by +1" in message and "nothing was written" in message


def test_an_applied_change_is_diagnosed_as_applied(desk: Desk) -> None:
    older = text(line7="old")
    message = desk.refuse(published({"vllm/a.py": older}, {"vllm/a.py": text()}), PatchError)
    assert "applied already" in message


def test_a_like_looking_block_is_not_patched(desk: Desk) -> None:
    older = text(line20="other 20")
    diff = published({"vllm/a.py": older}, {"vllm/a.py": text(line20="other 20", line21="x")})
    message = desk.refuse(diff, PatchError)
    assert 'expected  "other 20"' in message and 'found     "line 20"' in message
    assert "one line differs" in message


def test_every_file_that_does_not_fit_is_named(desk: Desk) -> None:
    older = {path: b"new top\n" + BASE[path] for path in ("vllm/a.py", "vllm/b.py")}
    newer = {path: data.replace(b"line 9\n", b"x\n") for path, data in older.items()}
    message = desk.refuse(published(older, newer), PatchError)
    assert "vllm/a.py, hunk 1 of 1" in message and "vllm/b.py, hunk 1 of 1" in message


def test_the_wrong_file_is_refused(desk: Desk) -> None:
    diff = published({"vllm/a.py": b"p\nq\nr\n"}, {"vllm/a.py": b"p\nQ\nr\n"})
    assert "no block in this file looks like it" in desk.refuse(diff, PatchError)


def test_an_added_file_that_the_base_has_is_refused(desk: Desk) -> None:
    diff = published({}, {"vllm/a.py": b"a\nb\n"})
    assert "has this file already" in desk.refuse(diff, PatchError)


@pytest.mark.parametrize("path", ["vllm/../../etc/x.py", "../x.py", "/etc/x.py", "vllm//x.py"])
def test_a_path_that_leaves_the_root_is_refused_and_not_just_dropped(desk: Desk, path: str) -> None:
    diff = published({"vllm/a.py": text()}, {"vllm/a.py": text(line7="seven")})
    message = desk.refuse(diff.replace(b"vllm/a.py", path.encode()), ConfigError)
    assert "unsafe path" in message


def test_a_protected_file_is_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    diff = published({}, {"vllm/_version.py": b"a\nb\n"})
    assert "no patch may change" in desk.refuse(diff, PatchError)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"deleted file mode 100644\n", "deletes it"),
        (b"similarity index 100%\nrename from vllm/a.py\nrename to vllm/b.py\n", "renames it"),
        (b"old mode 100644\nnew mode 100755\n", "changes its file mode"),
        (b"index 1..2 100644\nGIT binary patch\nliteral 0\n\n", "is a binary change"),
        (b"index 1..2 100644\nBinary files a/vllm/a.py and b/vllm/a.py differ\n", "binary change"),
        (b"new file mode 120000\n", "file mode 120000"),
        (b"new file mode 100644\nindex 0000000..e69de29\n", "no hunk"),
    ],
)
def test_more_than_a_change_of_text_in_the_wheel_is_refused_with_its_reason(
    desk: Desk, head: bytes, reason: str
) -> None:
    message = desk.refuse(b"diff --git a/vllm/a.py b/vllm/a.py\n" + head, ConfigError)
    assert "vllm/a.py" in message and reason in message


def test_a_diff_with_nothing_for_the_wheel_is_refused_with_the_list(desk: Desk) -> None:
    diff = published({"csrc/k.cu": text(5)}, {"csrc/k.cu": text(5, line3="x")})
    message = desk.refuse(diff, ConfigError)
    assert "changes nothing that vllm 1.0 holds" in message and "csrc/k.cu" in message


def test_a_cut_diff_is_refused(desk: Desk) -> None:
    diff = published({"vllm/a.py": text()}, {"vllm/a.py": text(line7="seven")})
    message = desk.refuse(diff[: diff.index(b" line 9")], ConfigError)
    assert "ends inside the hunk of line 5" in message


def test_text_after_the_diff_is_refused(desk: Desk) -> None:
    diff = published({"vllm/a.py": text()}, {"vllm/a.py": text(line7="seven")})
    assert "text after its last diff" in desk.refuse(diff + b"and so on\n", ConfigError)


def test_a_diff_converted_to_crlf_as_a_whole_is_refused(desk: Desk) -> None:
    diff = published({"vllm/a.py": text()}, {"vllm/a.py": text(line7="seven")})
    assert "CRLF" in desk.refuse(diff.replace(b"\n", b"\r\n"), ConfigError)


def test_a_page_that_is_no_diff_is_refused(desk: Desk) -> None:
    assert "no `diff --git` line" in desk.refuse(b"<html>\n", ConfigError)


@pytest.mark.parametrize(
    "name", ["backports/x.diff", "other/x.patch", "x.patch", "fixes/../x.patch", "fixes/one.patch"]
)
def test_a_name_that_is_taken_or_out_of_place_is_refused(desk: Desk, name: str) -> None:
    diff = published({"vllm/a.py": text()}, {"vllm/a.py": text(line7="seven")})
    message = desk.refuse(diff, ConfigError, name=name)
    assert "choose another with --name" in message or "unsafe path" in message


def test_a_missing_diff_file_is_named(desk: Desk) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.diff"):
        import_diff(
            desk.folder / "nothing.diff", desk.patches, BASE.get, "vllm 1.0", desk.said.append
        )
