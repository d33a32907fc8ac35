"""The options of `vllm-bidir-router` as docs/router.md lists them: `make docs` writes them anew.

Made from the parser and not from what it prints, which differs between versions of Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/router.md"
BEGIN, END = "<!-- options: written by `make docs` -->\n", "<!-- end of options -->\n"


def listed(made: argparse.ArgumentParser) -> str:
    """All options, a table for each group that has any, in the order of `--help`."""
    return "\n".join(table for group in made._action_groups if (table := "".join(_rows(group))))


def with_options(page: str, made: argparse.ArgumentParser) -> str:
    """The page with what stands between its two marks written anew; ValueError without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} must hold the lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n{listed(made)}\n{end}{after}"


def _rows(group: argparse._ArgumentGroup) -> Iterator[str]:
    actions = [one for one in group._group_actions if one.dest != "help"]
    if actions:
        yield f"| {'option' if group.title == 'options' else group.title} | |\n|---|---|\n"
    for one in actions:
        flags = " ".join(filter(None, (" ".join(one.option_strings), _value(one))))
        yield f"| `{flags}` | {_escaped(str(one.help))} |\n"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    value = str(action.metavar or "/".join(action.choices or ()) or action.dest.upper())
    return f"{value} …" if action.nargs == "+" else value


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> int:
    """Write the page anew."""
    sys.path.insert(0, str(ROOT / "overlay"))
    from vllm.bidir.router.options import parser

    PAGE.write_text(with_options(PAGE.read_text("utf-8"), parser()), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
