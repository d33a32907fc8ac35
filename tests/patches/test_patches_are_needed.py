"""Without its patch, the test that a patch names fails, and fails by its assertion.

For each patch the installed vllm is laid out again as links, only the files of that patch are
put back to what they are without it, and its `Test:` runs against that copy in a new process. That
is forked from one that has imported what vllm imports of others, most of what a run takes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tools.build.hashing import git_blob

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "patches"
NOTE = b"# Modified by "
# What takes longest to import; none of them imports vllm.
PRELOADED = [
    "openai",
    "rfc3987_syntax",
    "torch._inductor.standalone_compile",
    "transformers.models.auto.image_processing_auto",
]
LONGEST_S = 300
# Starting a process and joining one both take the exit codes of all that have ended.
ONE_AT_A_TIME = threading.Lock()
FILE = re.compile(r"^diff --git a/(\S+) b/\S+\n(?:new file .*\n)?index \w+\.\.(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Patch:
    """One entry of the series: the test it names, and the blob it makes of each path."""

    name: str
    test: str
    after: tuple[tuple[str, str], ...]

    @property
    def paths(self) -> set[str]:
        return {path for path, _ in self.after}


def read_patch(name: str) -> Patch:
    head, _, diff = (PATCHES / name).read_text(encoding="utf-8").partition("\n---\n")
    (test,) = re.findall(r"^Test: (.+)$", head, re.MULTILINE)
    return Patch(name, test, tuple(FILE.findall(diff)))


def read_series() -> list[Patch]:
    lines = (PATCHES / "series").read_text(encoding="utf-8").splitlines()
    return [read_patch(name) for line in lines if (name := line.partition("#")[0].strip())]


def without_note(data: bytes) -> bytes:
    """`data` without the change note that the build adds to its leading comments."""
    lines = data.splitlines(keepends=True)
    for at, line in enumerate(lines):
        if not line.startswith(b"#"):
            break
        if line.startswith(NOTE):
            return b"".join([*lines[:at], *lines[at + 1 :]])
    return data


def installed_package() -> Path:
    """The folder of the installed vllm, which must be a wheel that this project built."""
    version = importlib.metadata.version("vllm")
    assert "bidir" in version, (
        f"vllm {version} is installed, expected a version with 'bidir': "
        "run `make wheel DEVICE=cpu` and install what it writes"
    )
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def git_apply(folder: Path, patch: Patch, *options: str) -> bool:
    """Applies in `folder`, at any line but with exact context, all files or none."""
    command = ["git", "apply", *options, str(PATCHES / patch.name)]
    # Below a checkout git would take the paths as relative to that checkout's root.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    return done.returncode == 0


def take_out(farm: Path, series: Sequence[Patch], patch: Patch) -> None:
    """Reverts `patch` in `farm`, keeping later patches where they do not build on it."""
    if git_apply(farm, patch, "--reverse"):
        return
    later = [other for other in series[series.index(patch) + 1 :] if patch.paths & other.paths]
    for other in [*reversed(later), patch]:
        assert git_apply(farm, other, "--reverse"), f"{other.name} cannot be reverted"
    for other in later:
        git_apply(farm, other)


def lay_out(farm: Path, series: Sequence[Patch]) -> None:
    """Links the installed package into `farm`; every patched file is a copy without its note."""
    package = installed_package()
    shutil.copytree(package, farm / package.name, copy_function=os.symlink)
    for path, blob in dict(pair for patch in series for pair in patch.after).items():
        copy = farm / path
        data = without_note(copy.read_bytes())
        assert git_blob(data) == blob, (
            f"the installed {path} is not what patches/ makes of it: build and install again"
        )
        copy.unlink()
        copy.write_bytes(data)
        for cached in (copy.parent / "__pycache__").glob(f"{copy.stem}.*.pyc"):
            cached.unlink()


@dataclass(frozen=True)
class Ended:
    """How a test run has ended, and all that it has written."""

    code: int | None
    output: str


def run_test(farm: Path, test: str, output: Path) -> None:
    """In a process of its own: the test, with the farm's vllm."""
    assert "vllm" not in sys.modules
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    paths = [str(farm), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path.insert(0, str(farm))
    # What is preloaded has imported plugins of pytest.
    options = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    options += ["-q", "--tb=short", "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*options, test]))


def run_without(patch: Patch, folder: Path) -> Ended:
    """The patch's test, in a process with everything installed but this one patch."""
    series, farm, output = read_series(), folder / "farm", folder / "output"
    lay_out(farm, series)
    take_out(farm, series, patch)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=run_test, args=(farm, patch.test, output))
    with ONE_AT_A_TIME:
        process.start()
    in_time = wait([process.sentinel], LONGEST_S)
    with ONE_AT_A_TIME:
        if not in_time:
            process.kill()
        process.join()
        code = process.exitcode
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    return Ended(code, text)


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Ended]]]:
    """The processes of all patches that are tested in this session, as many at once as cores."""
    wanted = [
        item.callspec.params["patch"]
        for item in request.session.items
        if getattr(item, "originalname", "") == test_named_test_fails_without_the_patch.__name__
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {
            patch.name: pool.submit(run_without, patch, tmp_path_factory.mktemp("without"))
            for patch in wanted
        }


@pytest.mark.parametrize("patch", read_series(), ids=lambda patch: patch.name)
def test_named_test_fails_without_the_patch(patch: Patch, runs: dict[str, Future[Ended]]) -> None:
    """With everything installed but this one patch, its test ends in a failed assertion."""
    ended = runs[patch.name].result()
    assert ended.code == pytest.ExitCode.TESTS_FAILED, ended.output
    failed = r"^E +(AssertionError|assert |Failed: DID NOT RAISE|\S+\.WrongKVError:)"
    assert re.search(failed, ended.output, re.MULTILINE), ended.output
