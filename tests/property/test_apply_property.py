"""For any two versions of a file, git's diff between them applies exactly, and only there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.build.tiny import HEADERS, git_diff
from tools.build.apply import apply_series
from tools.build.errors import PatchError
from tools.build.patch import Patch, parse_patch

PATH = "vllm/file.py"
# Few different lines, so that blocks repeat and a careless applier finds the wrong one.
LINES = st.sampled_from(
    [
        b"\n",
        b"a\n",
        b"b\n",
        b"    return x\n",
        b"a\r\n",
        b"@@ -1 +1 @@\n",
        b"--- a/x\n",
        b"\xff\x85\n",
    ]
)
TAIL = st.sampled_from([b"", b"no newline at the end"])


@st.composite
def versions(draw: st.DrawFn) -> tuple[bytes, bytes]:
    before = draw(st.lists(LINES, min_size=1, max_size=30))
    after = list(before)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(after)))
        after[at : at + draw(st.integers(0, 2))] = draw(st.lists(LINES, max_size=2))
    return b"".join(before) + draw(TAIL), b"".join(after) + draw(TAIL)


def patch_between(before: bytes, after: bytes) -> Patch:
    with tempfile.TemporaryDirectory() as scratch:
        return parse_patch("x", HEADERS.encode() + git_diff(Path(scratch), PATH, before, after))


@given(versions())
@settings(max_examples=60, deadline=None)
def test_a_diff_turns_the_old_version_into_the_new_one(pair: tuple[bytes, bytes]) -> None:
    before, after = pair
    if before == after or not after:
        return
    done = apply_series([patch_between(before, after)], {PATH: before}.get, "x")
    assert done[PATH].data == after


@given(versions(), st.data())
@settings(max_examples=60, deadline=None)
def test_it_applies_to_no_other_version(pair: tuple[bytes, bytes], data: st.DataObject) -> None:
    before, after = pair
    if before == after or not after:
        return
    lines = before.split(b"\n")
    at = data.draw(st.integers(0, len(lines)))
    other = b"\n".join([*lines[:at], data.draw(st.sampled_from([b"", b"a", b"zz"])), *lines[at:]])
    if other == before:
        return
    with pytest.raises(PatchError):
        apply_series([patch_between(before, after)], {PATH: other}.get, "x")
