"""Turn an upstream pull request's published diff into a patch of ours.

Takes a plain diff or a `git format-patch` mail. What a wheel does not hold (tests, docs,
C++ sources, build files) is dropped and listed; the rest must fit at its exact lines on top
of the series as it stands, or nothing is written.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tools.build.apply import Reader, apply_file, apply_series
from tools.build.errors import ConfigError, PatchError
from tools.build.hashing import git_blob
from tools.build.patch import (
    SEPARATOR,
    FilePatch,
    check_path,
    parse_diff,
    parse_patch,
    patch_files,
    read_patches,
    read_series,
)
from tools.build.series.export import canonical_diff, write_patches
from tools.build.series.lint import FILL_IN, FOLDERS, HEADERS
from tools.build.series.published import Section, read_published

_ROOT = "vllm/"


@dataclass(frozen=True)
class Dropped:
    """A file of the diff that does not become part of the patch, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Imported:
    """What an import wrote: `to_fill` are the headers that a person still has to write."""

    name: str
    files: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]
    to_fill: tuple[str, ...]


def import_diff(
    diff: Path,
    patches_dir: Path,
    read: Reader,
    release: str,
    say: Callable[[str], None],
    name: str | None = None,
) -> Imported:
    """Write `diff` as a new patch at the end of the series; report through `say`.

    `read` gives the base wheel's files, `release` names it in messages. `name` is the patch's
    path below patches/, by default backports/pr-40186.patch for 40186.diff. Raises ConfigError
    for a diff or name that cannot be used and PatchError for hunks that do not fit.
    """
    target = _target(diff, patches_dir, name)
    try:
        published = read_published(diff.name, diff.read_bytes())
    except OSError as error:
        raise ConfigError(f"error: cannot read {diff}: {error.strerror}") from error
    series = read_patches(patches_dir)
    changed = apply_series(series, read, release)

    def current(path: str) -> bytes | None:
        return changed[path].data if path in changed else read(path)

    kept, dropped = _sort_out(diff.name, published.sections, current, release)
    files = parse_diff(diff.name, b"".join(section.data for section in kept))
    before: dict[str, bytes] = {}
    after: dict[str, bytes] = {}
    notes: list[str] = []
    failures: list[PatchError] = []
    for file in files:
        data = current(file.path)
        earlier = changed[file.path].patches if file.path in changed else ()
        try:
            after[file.path] = _apply(diff.name, file, data, release, earlier, notes)
        except PatchError as error:
            failures.append(error)
        if data is not None:
            before[file.path] = data
    if failures:
        raise PatchError(
            f"error: {diff.name} does not apply to {release} with the series; nothing was written",
            [row for error in failures for row in error.details or (("found", error.subject),)],
            "set the hunks right in the diff for this release, then import it again",
        )
    headers = _headers(diff, published.subject)
    head = "".join(f"{key}: {value}\n" for key, value in headers.items()).encode()
    content = head + SEPARATOR + canonical_diff(before, after)
    # What is written must be a patch that the next build can use.
    apply_series([parse_patch(target, content)], current, release)
    write_patches(patches_dir, {target: content}, _appended(patches_dir / "series", target))
    done = Imported(
        target,
        tuple(file.path for file in files),
        tuple(dropped),
        tuple(notes),
        tuple(key for key, value in headers.items() if value == FILL_IN),
    )
    say(_summary(done))
    return done


def _sort_out(
    name: str, sections: tuple[Section, ...], current: Reader, release: str
) -> tuple[list[Section], list[Dropped]]:
    kept: list[Section] = []
    dropped: list[Dropped] = []
    refused: list[tuple[str, str]] = []
    for section in sections:
        if not section.path.startswith(_ROOT) and not section.source.startswith(_ROOT):
            dropped.append(Dropped(section.path, f"outside {_ROOT}"))
        elif section.source.startswith(_ROOT) and current(section.source) is None:
            dropped.append(Dropped(section.path, f"{release} has no {section.source}"))
        elif section.refusal:
            refused.append((section.source or section.path, f"the diff {section.refusal}"))
        elif b"\n@@ " not in section.data:
            refused.append((section.path, "the diff has no hunk for it; an overlay can add it"))
        else:
            kept.append(section)
    if refused:
        raise ConfigError(
            f"error: {name} does more to the wheel's files than change or add text",
            refused,
            "take these files out of the diff and solve them in the overlay, or by another patch",
        )
    if not kept:
        raise ConfigError(
            f"error: {name} changes nothing that {release} holds",
            [("dropped", f"{item.path}: {item.reason}") for item in dropped],
            "it may be for another release, or for C++ sources, which a wheel cannot patch",
        )
    return kept, dropped


def _apply(
    name: str,
    file: FilePatch,
    data: bytes | None,
    release: str,
    earlier: tuple[str, ...],
    notes: list[str],
) -> bytes:
    """Apply one file's hunks strictly; published blob ids are short and may be of another base."""
    before = git_blob(data) if data is not None and not file.adds_file else file.before
    result = _replace_lines(data or b"", file)
    # apply_file places the hunks and says why one does not fit; with a hunk that does not fit
    # this second blob id means nothing and is never reached.
    done = apply_file(name, replace(file, before=before, after=git_blob(result)), data, release)
    if before.startswith(file.before):
        if not git_blob(done).startswith(file.after):
            raise PatchError(
                f"error: {name} contradicts itself",
                [
                    ("file", file.path),
                    ("expected", f"git blob {file.after} after the patch"),
                    ("found", f"git blob {git_blob(done)}: hunks and `index` line disagree"),
                ],
            )
        return done
    why = f"changed by {', '.join(earlier)}" if earlier else "the two differ outside its hunks"
    notes.append(
        f"{file.path}: the diff was made on blob {file.before}, here it is "
        f"{before[: len(file.before)]} ({why}); its hunks fit exactly"
    )
    return done


def _replace_lines(data: bytes, file: FilePatch) -> bytes:
    lines = io.BytesIO(data).readlines()
    for hunk in reversed(file.hunks):
        lines[hunk.start - 1 : hunk.start - 1 + len(hunk.old)] = hunk.new
    return b"".join(lines)


def _target(diff: Path, patches_dir: Path, name: str | None) -> str:
    stem = diff.stem
    target = name or f"backports/{f'pr-{stem}' if stem.isdigit() else stem}.patch"
    check_path("--name", target)
    folder, _, rest = target.partition("/")
    if folder not in FOLDERS or "/" in rest or not rest.endswith(".patch"):
        raise ConfigError(
            f"error: a patch cannot be called {target}",
            [("expected", f"one of {', '.join(f'{f}/' for f in FOLDERS)} and a name.patch")],
            "choose another with --name backports/<name>.patch",
        )
    if target in patch_files(patches_dir) or target in read_series(patches_dir):
        raise ConfigError(
            f"error: patches/{target} is there already; nothing was written",
            next_step="choose another with --name backports/<name>.patch, or drop the old one",
        )
    return target


def _headers(diff: Path, subject: str) -> dict[str, str]:
    known = {"Subject": subject} if subject else {}
    if diff.stem.isdigit():
        known |= {
            "Forwarded": f"not needed, it comes from upstream PR #{diff.stem}",
            "Origin": f"upstream PR #{diff.stem}",
            "Drop-when": f"a base release contains upstream PR #{diff.stem}",
        }
    return {key: known.get(key, FILL_IN) for key in HEADERS}


def _appended(series: Path, name: str) -> bytes:
    text = series.read_bytes()
    gap = b"" if not text or text.endswith(b"\n") else b"\n"
    return text + gap + name.encode() + b"\n"


def _summary(done: Imported) -> str:
    lines = [f"wrote patches/{done.name} and listed it in patches/series"]
    lines += [f"  patched  {path}" for path in done.files]
    lines += [f"  dropped  {item.path} ({item.reason})" for item in done.dropped]
    lines += [f"  note     {note}" for note in done.notes]
    if done.to_fill:
        lines.append(
            f"  next     write its headers {', '.join(done.to_fill)}; "
            f"make lint refuses `{FILL_IN}` until then"
        )
    return "\n".join(lines)
