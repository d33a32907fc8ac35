"""`pip wheel .` and `python -m build -w`: the same wheel as `make wheel`, byte for byte.

DEVICE, ARCH, UPSTREAM_WHEEL, BIDIR_CACHE and SOURCE_DATE_EPOCH choose what is built, as there.
"""

import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.dist_info import dist_info
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from tools.build.errors import BuildError  # noqa: E402
from tools.build.pipeline import Checkout, Options, build, metadata_of, select  # noqa: E402


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class BuildPatchedWheel(bdist_wheel):
    """Run our pipeline instead of packing a source tree."""

    def run(self) -> None:
        out = Path(self.dist_dir or "dist")
        built = build(Checkout(ROOT), Options.from_environment(os.environ, out), say)
        self.distribution.dist_files.append(("bdist_wheel", "", str(built.wheel)))


class PatchedDistInfo(dist_info):
    """The metadata that the wheel will carry, for tools that ask for it before they build."""

    def run(self) -> None:
        super().run()
        options = Options.from_environment(os.environ, Path("dist"))
        _, texts = metadata_of(Checkout(ROOT), options, say)
        for name, data in texts.items():
            (Path(self.dist_info_dir) / name).write_bytes(data)


def refuse() -> None:
    raise SystemExit(
        "error: this checkout holds patches and an overlay, not vLLM's sources\n"
        "  expected  a wheel build\n"
        "  next      make wheel, then pip install dist/*.whl"
    )


class NoEditable(editable_wheel):
    """`pip install -e .` would need the sources that only the built wheel has."""

    def run(self) -> None:
        refuse()


class NoSdist(sdist):
    """`python -m build` without -w would pack a tree that is not vLLM."""

    def run(self) -> None:
        refuse()


def main() -> None:
    options = Options.from_environment(os.environ, Path("dist"))
    _, _, label = select(Checkout(ROOT), options)
    setup(
        name=label.name,
        version=label.version,
        packages=[],
        py_modules=[],
        cmdclass={
            "bdist_wheel": BuildPatchedWheel,
            "dist_info": PatchedDistInfo,
            "editable_wheel": NoEditable,
            "sdist": NoSdist,
        },
    )


try:
    main()
except BuildError as error:
    print(error, file=sys.stderr)
    raise SystemExit(error.exit_code) from None
