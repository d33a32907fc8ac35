"""The base release's own tests pass on our wheel as they do on the stock one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.upstream.compare import Ran, list_problems, problems
from tests.upstream.selection import file_of, read_differences, read_groups, read_stock
from tests.upstream.tree import ROOT

STOCK = read_stock()
KNOWN = read_differences()
FILES = [(group.name, file) for group in read_groups() for file in group.files]


@pytest.mark.parametrize(("group", "file"), FILES, ids=[file for _, file in FILES])
def test_a_file_does_what_it_does_on_stock(
    group: str,
    file: str,
    runs: dict[str, Ran],
    record_property: Callable[[str, object], None],
) -> None:
    ran = runs[group]
    found = problems(file, STOCK[file], ran, KNOWN)
    words = [outcome.word for test, outcome in ran.outcomes.items() if file_of(test) == file]
    counts = ", ".join(f"{words.count(word)} {word}" for word in sorted(set(words)))
    summary = f"{file}: {counts or 'none run'}; stock: {len(STOCK[file])} passed"
    record_property("upstream", summary)
    if found:
        pytest.fail("\n".join([summary, *found]), pytrace=False)


def test_the_upstream_tests_import_the_installed_wheel(
    runs: dict[str, Ran], tmp_path_factory: pytest.TempPathFactory
) -> None:
    for ran in runs.values():
        assert ran.vllm, f"the process never imported vllm: it {ran.ended}"
        assert not Path(ran.vllm).is_relative_to(tmp_path_factory.getbasetemp())
        assert not Path(ran.vllm).is_relative_to(ROOT / "vllm")


def test_every_known_difference_has_a_reason_and_a_twin_of_ours() -> None:
    assert list_problems(KNOWN, STOCK, ROOT) == ()


def test_every_selected_file_has_tests_that_pass_on_stock_and_no_other_is_listed() -> None:
    assert sorted(STOCK) == sorted(file for _, file in FILES)
