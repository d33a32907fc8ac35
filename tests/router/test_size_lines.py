"""What is known of a chunk by its length is what its size is written as, or nothing."""

from __future__ import annotations

import pytest
from vllm.bidir.router.nodes.size_lines import SizeLines


@pytest.mark.parametrize("size", [1, 9, 10, 15, 16, 255, 256, 4088])
def test_a_chunk_begins_with_its_size(size: int) -> None:
    chunk = b"%x\r\n%b\r\n" % (size, b"x" * size)
    assert SizeLines()[len(chunk)] == b"%x\r\n" % size


def test_of_each_length_there_is_one_beginning_or_none() -> None:
    """None: the end of a stream, and where one digit more would be one byte too many."""
    lines = SizeLines()
    chunks = {len(b"%x" % size) + 4 + size: b"%x\r\n" % size for size in range(1, 4090)}
    assert {length: lines[length] for length in range(4097) if lines[length]} == chunks
    assert [length for length in range(4097) if not lines[length]] == [*range(6), 21, 262]


def test_what_is_long_is_not_remembered() -> None:
    lines = SizeLines()
    assert not b"1001\r\n".startswith(lines[5000]) and not b"".startswith(lines[1 << 30])
    assert not lines
