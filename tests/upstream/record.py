"""Record which of the selected upstream tests pass: `python -m tests.upstream.record FILE`.

Run it with the stock wheel installed, after a change to selection.toml or to the pinned release.
It runs everything in the selected files twice, and keeps what passes both times.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.upstream.processes import run_groups
from tests.upstream.selection import by_file, read_groups
from tests.upstream.tree import lay_out

HEAD = """\
# The upstream tests that pass on the stock CPU wheel, {count} of them; the others of their files
# need a GPU, weights or a tokenizer from the hub, or a server.
# Written by `python -m tests.upstream.record`; version {version}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="where the list is written")
    file: Path = parser.parse_args().file

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    groups = read_groups()
    with tempfile.TemporaryDirectory(prefix="upstream-") as folder:
        places = lay_out(Path(folder), say)
        first = run_groups(groups, None, places, say)
        passed = [
            test
            for group in groups
            for test, outcome in first[group.name].outcomes.items()
            if outcome.word == "passed"
        ]
        only: dict[str, list[str]] = {
            path: [] for group in groups for path in group.files
        } | by_file(passed)
        second = run_groups(groups, only, places, say)
    kept = [
        test
        for group in groups
        for path in group.files
        for test in only[path]
        if (again := second[group.name].outcomes.get(test)) and again.word == "passed"
    ]
    for test in sorted(set(passed) - set(kept)):
        say(f"left out, for it passes only in company: {test}")
    version = next(iter(second.values())).version
    head = HEAD.format(count=len(kept), version=version)
    file.write_text(head + "\n".join(kept) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
