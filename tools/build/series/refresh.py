"""Carry the series over to another base release with real three-way merges.

A scratch git repository holds both releases' trees as commits, the series on top of the old
one; each patch is then picked onto the new one. A conflict stops here with everything needed
to go on; patches/ changes only when all of them are through and apply strictly.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.build.apply import apply_series
from tools.build.errors import BuildError, ConfigError, OutputError, PatchError
from tools.build.patch import Patch, parse_patch, read_patches
from tools.build.series.conflicts import Trees, describe, split_lines, unmerged
from tools.build.series.drift import compare
from tools.build.series.export import diff_commits, split_patch, steps, write_patches
from tools.build.series.scratch import Commit, Scratch
from tools.build.series.trees import wheel_tree

RESOLVED = "conflict resolved"
TAKEN = "taken upstream"
CONFLICT = "conflict"

_STATE = "refresh.json"


@dataclass(frozen=True)
class Row:
    """What became of one patch; `commit` is the new one, empty if it left none."""

    name: str
    status: str
    detail: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Report:
    """The result of a refresh. `written` and `taken` are empty if patches/ was left alone."""

    rows: tuple[Row, ...]
    written: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()

    @property
    def conflicts(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows if row.status == CONFLICT)

    def table(self) -> str:
        """patch | what became of it | details"""
        name_width = max((len(row.name) for row in self.rows), default=0)
        width = max((len(row.status) for row in self.rows), default=0)
        lines: list[str] = []
        for row in self.rows:
            first, *rest = row.detail.split("\n")
            lines.append(f"{row.name:<{name_width}}  {row.status:<{width}}  {first}".rstrip())
            lines += [f"{'':<{name_width + width + 4}}{line}" for line in rest]
        return "\n".join(lines)


@dataclass(frozen=True)
class Refresh:
    """One refresh: what goes where. `old_tree` and `new_tree` map paths to bytes."""

    old_tree: Mapping[str, bytes]
    new_tree: Mapping[str, bytes]
    patches: tuple[Patch, ...]
    work_dir: Path
    from_version: str
    to_version: str

    @property
    def repo(self) -> Scratch:
        return Scratch(self.work_dir / "repo")

    @property
    def state(self) -> Path:
        return self.work_dir / _STATE


def refresh(
    old_tree: Mapping[str, bytes],
    new_wheel: Path,
    patches_dir: Path,
    work_dir: Path,
    from_version: str,
    to_version: str,
    say: Callable[[str], None],
    *,
    continue_: bool = False,
    dry_run: bool = False,
) -> Report:
    """Rebase the series from one release onto another and write it back to `patches_dir`.

    `old_tree` maps the old base's paths to bytes (see `trees.wheel_tree`); `work_dir` is this
    refresh's own folder. With `dry_run`, conflicts are reported, not raised, the next patch is
    tried, and patches/ is left alone. `continue_` goes on after a resolved conflict. Raises
    PatchError (exit 3) at a conflict, ConfigError when it cannot begin or go on.
    """
    job = Refresh(
        old_tree,
        wheel_tree(new_wheel),
        read_patches(patches_dir),
        work_dir.with_name(f"{work_dir.name}-dry-run") if dry_run else work_dir,
        from_version,
        to_version,
    )
    if not job.patches:
        say("the series is empty; there is nothing to refresh")
        return Report(())
    if continue_:
        if dry_run:
            raise ConfigError("error: a dry run has nothing to continue")
        state = _load(job)
        rows = [Row(**row) for row in state["rows"]]
        commits = list(state["commits"])
        _check_resolved(job, state["head"])
        rows.append(_settle(job, job.patches[len(rows)], commits[len(rows)], resolved=True))
    else:
        rows = []
        commits = _begin(job)
    for patch, commit in list(zip(job.patches, commits, strict=True))[len(rows) :]:
        rows.append(_pick(job, patch, commit, commits, rows, say, dry_run))
    if dry_run:
        report = Report(tuple(rows))
        say(report.table())
        return report
    report = _write(job, rows, patches_dir)
    say(report.table())
    say(_written(job, report))
    return report


def _begin(job: Refresh) -> list[str]:
    """Make the scratch repository; return the commit of each patch on the old release."""
    release = f"vllm {job.from_version}"
    series = steps(job.patches, job.old_tree.get, release)
    if job.work_dir.exists() and any(job.work_dir.iterdir()):
        if job.state.exists() and not _state(job)["done"]:
            raise ConfigError(
                f"error: a refresh to {job.to_version} is under way in {_shown(job.work_dir)}",
                next_step=f"make refresh TO={job.to_version} CONTINUE=1, or begin anew after\n"
                f"rm -r {shlex.quote(_shown(job.work_dir))}",
            )
        if not job.state.exists():
            raise ConfigError(
                f"error: {_shown(job.work_dir)} exists and is not a refresh's work folder",
                next_step="delete it, or move it away",
            )
        shutil.rmtree(job.work_dir)
    _save(job, [], [], "", done=True)
    repo = Scratch.create(job.work_dir / "repo")
    heads = {
        patch.name: "".join(f"{k}: {v}\n" for k, v in patch.headers.items())
        for patch in job.patches
    }
    commits = [
        Commit(f"vllm {job.from_version}\n".encode(), job.old_tree),
        *(
            Commit(_message(heads[step.name], step.name), step.after, k)
            for k, step in enumerate(series)
        ),
        Commit(f"vllm {job.to_version}\n".encode(), job.new_tree),
    ]
    ids = repo.commit_all(commits)
    for branch, commit in (("old", ids[0]), ("series", ids[-2]), ("new", ids[-1])):
        repo.git("branch", branch, commit)
    repo.git("checkout", "--quiet", "-B", "refreshed", ids[-1])
    return ids[1:-1]


def _message(headers: str, name: str) -> bytes:
    subject = re.search(r"^Subject: (.*)$", headers, re.MULTILINE)
    title = subject[1] if subject else name
    return f"{title}\n\n{headers}\nPatch: {name}\n".encode()


def _pick(
    job: Refresh,
    patch: Patch,
    commit: str,
    commits: list[str],
    rows: list[Row],
    say: Callable[[str], None],
    dry_run: bool,
) -> Row:
    done = job.repo.git("cherry-pick", "--no-commit", commit, check=False)
    if done.code == 0:
        return _settle(job, patch, commit, resolved=False)
    stages = unmerged(job.repo)
    if not stages:
        raise BuildError(
            f"error: git cannot pick patches/{patch.name}",
            [("found", done.err or done.out.decode("utf-8", "backslashreplace"))],
        )
    trees = Trees(job.old_tree, job.new_tree, job.to_version)
    details = describe(job.repo, patch, stages, trees)
    if dry_run:
        job.repo.git("reset", "--quiet", "--hard")
        job.repo.git("clean", "--quiet", "--force", "-d", "-x")
        return Row(patch.name, CONFLICT, _skipped(patch, job, rows) + _brief(details))
    _save(job, commits, rows, job.repo.text("rev-parse", "HEAD"), done=False)
    if rows:
        say(Report(tuple(rows)).table())
    raise PatchError(
        f"error: patches/{patch.name} does not merge into vllm {job.to_version}",
        details,
        _commands(job, list(stages)),
    )


def _skipped(patch: Patch, job: Refresh, rows: list[Row]) -> str:
    """Names conflicting patches before this one that touch the same files."""
    mine = {file.path for file in patch.files}
    earlier = {p.name: {file.path for file in p.files} for p in job.patches}
    names = [row.name for row in rows if row.status == CONFLICT and mine & earlier[row.name]]
    return f"(perhaps only because {', '.join(names)} was left out)\n" if names else ""


def _brief(details: list[tuple[str, str]]) -> str:
    return "\n".join(text for word, text in details if word == "file")


def _settle(job: Refresh, patch: Patch, commit: str, *, resolved: bool) -> Row:
    """Commit what the index holds for a patch, unless it is what the new release has."""
    repo = job.repo
    tree = repo.text("write-tree")
    head = repo.text("rev-parse", "HEAD")
    if tree == repo.text("rev-parse", "HEAD^{tree}"):
        return Row(patch.name, TAKEN, "resolved to the release's own text" if resolved else "")
    message = repo.git("log", "-1", "--format=%B", commit).out
    new = repo.git("commit-tree", tree, "-p", head, stdin=message).out.decode().strip()
    repo.git("reset", "--quiet", "--hard", new)
    status, detail = compare(patch, diff_commits(repo, head, new))
    return Row(patch.name, RESOLVED if resolved else status, detail, new)


def _commands(job: Refresh, paths: list[str]) -> str:
    repo = shlex.quote(_shown(job.repo.root))
    files = " ".join(shlex.quote(path) for path in paths)
    again = f"make refresh TO={job.to_version} CONTINUE=1"
    return "\n".join(
        (
            "settle it between the conflict markers in the scratch repository:",
            *(f"  edit {shlex.quote(_shown(job.repo.root / path))}" for path in paths),
            f"  git -C {repo} add -- {files}",
            f"  {again}",
            "or, if the release has taken this patch:",
            f"  git -C {repo} reset --hard",
            f"  {again}",
        )
    )


def _check_resolved(job: Refresh, head: str) -> None:
    repo = job.repo
    shown = shlex.quote(_shown(repo.root))
    again = f"make refresh TO={job.to_version} CONTINUE=1"
    now = repo.text("rev-parse", "HEAD")
    if now != head:
        raise ConfigError(
            f"error: the scratch repository {_shown(repo.root)} has moved",
            [("expected", f"HEAD {head}"), ("found", f"HEAD {now}")],
            f"leave committing to us: git -C {shown} reset --soft {head}\n{again}",
        )
    status = repo.git("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all").out
    entries = [entry.decode() for entry in status.split(b"\0") if entry]
    unstaged = [entry[3:] for entry in entries if entry[1] != " "]
    if unstaged:
        raise PatchError(
            "error: the conflict is not settled yet",
            [("not added", path) for path in unstaged],
            f"edit each file, then git -C {shown} add -- {shlex.join(unstaged)}\n{again}",
        )
    staged = [entry[3:] for entry in entries if entry[0] in "AM"]
    left = [
        f"{path}, line {number}"
        for path in staged
        for number, line in enumerate(split_lines(repo.file("", path)), 1)
        if line.startswith((b"<<<<<<< ", b"||||||| ", b">>>>>>> "))
    ]
    if left:
        raise PatchError(
            "error: conflict markers are left",
            [("found", place) for place in left],
            f"remove them, git -C {shown} add the file, then\n{again}",
        )


def _write(job: Refresh, rows: list[Row], patches_dir: Path) -> Report:
    """Export all patches, prove that they apply strictly, then put them into patches/."""
    files: dict[str, bytes] = {}
    for row in rows:
        if row.commit:
            head, _ = split_patch(row.name, (patches_dir / row.name).read_bytes())
            diff = diff_commits(job.repo, f"{row.commit}^", row.commit)
            files[row.name] = head + diff
    new = [parse_patch(name, data) for name, data in files.items()]
    apply_series(new, job.new_tree.get, f"vllm {job.to_version}")
    taken = tuple(row.name for row in rows if not row.commit)
    series = patches_dir / "series"
    kept = [line for line in split_lines(series.read_bytes()) if _entry(line) not in taken]
    write_patches(patches_dir, files, b"".join(kept))
    for name in taken:
        _move(patches_dir / name, job.work_dir / "taken-upstream" / name)
    _save(job, [], rows, "", done=True)
    return Report(tuple(rows), tuple(files), taken)


def _entry(line: bytes) -> str:
    return line.decode("utf-8").split("#", 1)[0].strip()


def _move(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source, target)
    except OSError as error:
        raise OutputError(
            f"error: cannot move {source} to {target}: {error.strerror}",
            next_step="the series no longer lists it; move or delete it by hand",
        ) from error


def _written(job: Refresh, report: Report) -> str:
    lines = [f"wrote {len(report.written)} patch(es) for vllm {job.to_version} into patches/"]
    for name in report.taken:
        place = _shown(job.work_dir / "taken-upstream" / name)
        lines.append(f"  taken upstream: {name}, no longer in the series, kept as {place}")
    lines.append(
        f"  next: pin vllm {job.to_version} in upstream.toml ([[base]] rows), then make lint test"
    )
    return "\n".join(lines)


def _save(job: Refresh, commits: list[str], rows: list[Row], head: str, *, done: bool) -> None:
    state = {
        "done": done,
        "from": job.from_version,
        "to": job.to_version,
        "head": head,
        "patches": {patch.name: patch.sha256 for patch in job.patches},
        "commits": commits,
        "rows": [asdict(row) for row in rows],
    }
    try:
        job.work_dir.mkdir(parents=True, exist_ok=True)
        temporary = job.state.with_suffix(".tmp")
        temporary.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        temporary.replace(job.state)
    except OSError as error:
        raise OutputError(f"error: cannot write {job.state}: {error.strerror}") from error


def _state(job: Refresh) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(job.state.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"error: cannot read {job.state}: {error}",
            next_step=f"begin anew after rm -r {shlex.quote(_shown(job.work_dir))}",
        ) from error
    return state


def _load(job: Refresh) -> dict[str, Any]:
    if not job.state.exists() or (state := _state(job))["done"]:
        raise ConfigError(
            f"error: no refresh to {job.to_version} waits in {_shown(job.work_dir)}",
            next_step=f"make refresh TO={job.to_version}",
        )
    expected = {patch.name: patch.sha256 for patch in job.patches}
    if (state["from"], state["to"]) != (job.from_version, job.to_version):
        raise ConfigError(
            f"error: {_shown(job.work_dir)} holds a refresh of other releases",
            [("found", f"{state['from']} to {state['to']}")],
        )
    if state["patches"] != expected or list(state["patches"]) != list(expected):
        raise ConfigError(
            "error: patches/ has changed since this refresh began",
            next_step=f"put it back, or begin anew after rm -r {shlex.quote(_shown(job.work_dir))}",
        )
    return state


def _shown(path: Path) -> str:
    """A path as the user would type it: relative to where the command runs, if it is below."""
    here = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(path)
