"""Write patch files in one canonical form, so that exporting again gives the same bytes.

The form is what git prints with the flags below. CI exports the series again and compares: a
patch edited by hand, or exported with other settings, does not pass.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from tools.build.apply import Reader, apply_series
from tools.build.errors import ConfigError, OutputError
from tools.build.patch import SEPARATOR, Patch, read_patches
from tools.build.series.scratch import Commit, Scratch

# Those that equal git's defaults are named too: a default may change with git's version.
DIFF_FLAGS = (
    "--full-index",
    "--no-renames",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--unified=3",
    "--inter-hunk-context=0",
    "--diff-algorithm=myers",
    "--indent-heuristic",
)


@dataclass(frozen=True)
class Step:
    """The files that one patch of the series changes, before and after it."""

    name: str
    before: Mapping[str, bytes]
    after: Mapping[str, bytes]


def steps(patches: tuple[Patch, ...], read: Reader, release: str) -> list[Step]:
    """Apply the series patch by patch; PatchError as in `apply_series`."""
    state: dict[str, bytes] = {}

    def current(path: str) -> bytes | None:
        return state[path] if path in state else read(path)

    done: list[Step] = []
    for patch in patches:
        before = {
            file.path: data for file in patch.files if (data := current(file.path)) is not None
        }
        changed = apply_series([patch], current, release)
        after = {path: change.data for path, change in changed.items()}
        state.update(after)
        done.append(Step(patch.name, before, after))
    return done


def split_patch(name: str, data: bytes) -> tuple[bytes, bytes]:
    """A patch file's headers, up to and with the line `---`, and its diff."""
    head, separator, diff = data.partition(b"\n" + SEPARATOR)
    if not separator:
        raise ConfigError(f"error: {name} has no line `---` between its headers and its diff")
    return head + separator, diff


def diff_commits(repo: Scratch, before: str, after: str) -> bytes:
    """The canonical diff between two commits."""
    return repo.git("diff", *DIFF_FLAGS, before, after).out


def canonical_diff(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bytes:
    """The canonical diff between two small sets of files."""
    return _diffs([Step("", before, after)])[0]


def re_export(patches_dir: Path, read: Reader, release: str) -> dict[str, bytes]:
    """Every patch file as it should be: headers byte for byte, its diff written anew."""
    series = steps(read_patches(patches_dir), read, release)
    exported: dict[str, bytes] = {}
    for step, diff in zip(series, _diffs(series), strict=True):
        head, _ = split_patch(step.name, (patches_dir / step.name).read_bytes())
        exported[step.name] = head + diff
    return exported


def check_exports(patches_dir: Path, read: Reader, release: str) -> list[str]:
    """One problem for each patch file that is not byte for byte what `re_export` gives."""
    problems: list[str] = []
    for name, wanted in re_export(patches_dir, read, release).items():
        found = (patches_dir / name).read_bytes()
        if found != wanted:
            problems.append(
                f"patches/{name} is not as exported: {_first_difference(found, wanted)}"
            )
    return problems


def write_patches(patches_dir: Path, files: Mapping[str, bytes], series: bytes) -> None:
    """Put patch files and patches/series in place; OutputError, and nothing changed, if not.

    Everything is on disk under a temporary name before the first file is replaced, and the
    series comes last, so a full disk cannot leave half of a change behind.
    """
    staged: list[tuple[Path, Path]] = []
    try:
        for name, data in (*files.items(), ("series", series)):
            path = patches_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.tmp")
            staged.append((temporary, path))
            temporary.write_bytes(data)
        for temporary, path in staged:
            temporary.replace(path)
    except OSError as error:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)
        raise OutputError(
            f"error: cannot write {error.filename or patches_dir}: {error.strerror}",
            next_step="free the space or mend the permission, then run the command again",
        ) from error


def _diffs(series: list[Step]) -> list[bytes]:
    if not series:
        return []
    with tempfile.TemporaryDirectory(prefix="vllm-bidir-export-") as folder:
        repo = Scratch.create(Path(folder))
        sides = [side for step in series for side in (step.before, step.after)]
        ids = repo.commit_all([Commit(b"side\n", side) for side in sides])
        return [
            diff_commits(repo, before, after)
            for before, after in zip(ids[::2], ids[1::2], strict=True)
        ]


def _first_difference(found: bytes, wanted: bytes) -> str:
    pairs = zip_longest(io.BytesIO(found), io.BytesIO(wanted))
    number, old, new = next(
        (number, old, new) for number, (old, new) in enumerate(pairs, 1) if old != new
    )
    return f"line {number}: expected {_show(new)}, found {_show(old)}"


def _show(line: bytes | None) -> str:
    return "the end of the file" if line is None else repr(line.decode("utf-8", "backslashreplace"))
