"""The command line of the build tool: `python -m tools.build --help`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tools.build.archive import WheelReader
from tools.build.errors import EXIT_CODES, BuildError, ConfigError, PatchError, ProofError
from tools.build.fetch import fetch, fetch_unpinned
from tools.build.import_rules import check_imports
from tools.build.installed import check_installed, site_folders
from tools.build.manifest import manifest_path, read_manifest
from tools.build.patch import read_series
from tools.build.pins import ARCHES, DEVICES
from tools.build.pipeline import Checkout, Options, build, select
from tools.build.prove import prove
from tools.build.series.importer import import_diff
from tools.build.series.lint import check_patches
from tools.build.series.refresh import refresh
from tools.build.series.trees import base_rows, wheel_tree

ROOT = Path(__file__).resolve().parents[2]

EXAMPLES = """examples:
  python -m tools.build wheel                           the CUDA wheel, into dist/
  python -m tools.build wheel --device cpu              the CPU wheel
  python -m tools.build wheel --arch aarch64            for Arm, on any machine
  python -m tools.build prove dist/vllm-*.whl           check a finished wheel again
  python -m tools.build check-installed --python venv/bin/python
  python -m tools.build lint                            patches, series, import rules
  python -m tools.build import 40186.diff               a patch from an upstream diff
  python -m tools.build refresh --to 0.30.0 --dry-run   what a new release would do to them
"""


def say(line: str) -> None:
    """Progress goes to stderr, so that stdout carries results only."""
    print(line, file=sys.stderr, flush=True)


def _options(args: argparse.Namespace) -> Options:
    options = Options.from_environment(os.environ, args.out)
    return replace(
        options,
        device=args.device or options.device,
        arch=args.arch or options.arch,
        version=args.base_version or options.version,
        upstream_wheel=args.upstream_wheel or options.upstream_wheel,
    )


def _wheel(args: argparse.Namespace) -> None:
    begun = time.monotonic()
    built = build(Checkout(ROOT), _options(args), say)
    proof = built.proof
    say(
        f"proven: {proof.members} members, {proof.untouched} as released, "
        f"{proof.patched} patched, {proof.added} added, {time.monotonic() - begun:.1f} s"
    )
    print(built.wheel)


def _prove(args: argparse.Namespace) -> None:
    checkout = Checkout(ROOT)
    for wheel in args.wheels:
        manifest = read_manifest(args.manifest or manifest_path(wheel))
        wanted = manifest.base
        options = replace(
            _options(args), device=wanted.device, arch=wanted.arch, version=wanted.version
        )
        pins, base, _ = select(checkout, options)
        base_wheel = fetch(pins, base, options.cache, options.upstream_wheel, say)
        proof = prove(wheel, base_wheel, manifest)
        print(f"{wheel}: proven, {proof.members} members, {proof.untouched} as released")


def _check_installed(args: argparse.Namespace) -> None:
    manifest = read_manifest(args.manifest) if args.manifest else None
    found = check_installed(site_folders(args.python), manifest)
    print(f"vllm {found.version}: {found.files} files as built, no other owner of vllm/")


def _lint(args: argparse.Namespace) -> None:
    checkout = Checkout(ROOT)
    problems = check_patches(checkout.patches, ROOT / "tests") + check_imports(ROOT)
    if problems:
        raise ProofError.collect(
            "error: the checkout breaks its own rules", problems, "see docs/patches.md"
        )
    print(f"{len(read_series(checkout.patches))} patches: series, headers, paths, import rules")


def _import(args: argparse.Namespace) -> None:
    checkout, options = Checkout(ROOT), _options(args)
    pins, base, _ = select(checkout, options)
    path = fetch(pins, base, options.cache, options.upstream_wheel, say)
    with WheelReader(path) as reader:
        release = f"{base.name} {base.version}"
        import_diff(args.diff, checkout.patches, reader.read, release, print, args.name)


def _refresh(args: argparse.Namespace) -> None:
    """Three-way merges onto another release; afterwards, its rows for upstream.toml."""
    checkout, options = Checkout(ROOT), _options(args)
    pins, base, _ = select(checkout, options)
    if args.to == base.version:
        raise ConfigError(f"error: the series is for {args.to} already", next_step="--to another")
    old = fetch(pins, base, options.cache, options.upstream_wheel, say)
    new = fetch_unpinned(base.name, args.to, base.tag, options.cache, say)
    report = refresh(
        wheel_tree(old),
        new,
        checkout.patches,
        ROOT / "build/refresh" / f"{base.version}-{args.to}",
        base.version,
        args.to,
        print,
        continue_=getattr(args, "continue"),
        dry_run=args.dry_run,
    )
    if report.conflicts:
        raise PatchError(f"error: {len(report.conflicts)} patch(es) do not merge into {args.to}")
    if args.dry_run:
        return
    others = [b for b in pins.bases if b.version == base.version]
    wheels = [fetch_unpinned(b.name, args.to, b.tag, options.cache, say) for b in others]
    print("rows for upstream.toml, measured on what was downloaded just now:\n")
    print(base_rows(wheels))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.build",
        description=__doc__,
        epilog=f"{EXAMPLES}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, what: str, example: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog=f"example:\n  python -m tools.build {example}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def base_options(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--device", choices=DEVICES, help="default: $DEVICE or cuda")
        sub.add_argument("--arch", choices=ARCHES, help="default: $ARCH or x86_64")
        sub.add_argument("--base-version", help="default: $VERSION or upstream.toml's")
        sub.add_argument(
            "--upstream-wheel",
            type=Path,
            metavar="PATH",
            help="use this file as the base instead of downloading ($UPSTREAM_WHEEL)",
        )
        sub.add_argument("--out", type=Path, default=Path("dist"), help="default: dist")

    wheel = command("wheel", "build and prove a wheel", "wheel --device cpu")
    base_options(wheel)
    wheel.set_defaults(run=_wheel)

    proof = command("prove", "check finished wheels against manifest and base", "prove dist/*.whl")
    proof.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    proof.add_argument("--manifest", type=Path, help="default: the file beside the wheel")
    base_options(proof)
    proof.set_defaults(run=_prove)

    installed = command(
        "check-installed",
        "check the vllm of an environment against its RECORD and a manifest",
        "check-installed --python venv/bin/python",
    )
    installed.add_argument("--python", default=sys.executable, help="default: this interpreter")
    installed.add_argument("--manifest", type=Path, help="also compare with this manifest")
    installed.set_defaults(run=_check_installed)

    lint = command("lint", "check patches, series, headers and import rules", "lint")
    lint.set_defaults(run=_lint)

    importing = command("import", "make a patch of an upstream diff", "import 40186.diff")
    importing.add_argument("diff", type=Path, help="the diff as published")
    importing.add_argument("--name", help="default: backports/pr-NUMBER.patch")
    base_options(importing)
    importing.set_defaults(run=_import)

    refreshing = command("refresh", "rebase the series onto another release", "refresh --to 0.30.0")
    refreshing.add_argument("--to", required=True, metavar="VERSION", help="the other release")
    refreshing.add_argument(
        "--continue", action="store_true", help="go on after a conflict was resolved"
    )
    refreshing.add_argument("--dry-run", action="store_true", help="report only; change nothing")
    base_options(refreshing)
    refreshing.set_defaults(run=_refresh)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors are printed once, with their exit code (see --help)."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except BuildError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; nothing half-written was left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
