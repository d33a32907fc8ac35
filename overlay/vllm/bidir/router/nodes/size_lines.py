# SPDX-License-Identifier: Apache-2.0
"""How a chunk begins, by how long it is in its frame (RFC 9112, 7.1).

A stream's events are of few lengths. Whether one has come as one chunk is then a look into this
table, where to take its size out and compare it takes five steps.
"""

from __future__ import annotations

# A line of a size, and what no chunk begins with: bytes.startswith takes it, and says no.
Beginning = bytes | tuple[()]

_FRAME = len(b"\r\n\r\n")
# An event of more tokens than one is a hundred bytes or a thousand.
_LONGEST = 4096


class SizeLines(dict[int, Beginning]):
    """Filled as lengths come. A size as it is usually written: no extension, no leading zero.

    Of one that would be written in another way, or is beyond some pages, nothing is known.
    """

    def __missing__(self, length: int) -> Beginning:
        if length > _LONGEST:
            return ()
        line: Beginning = ()
        for size in range(max(1, length - _FRAME - len(f"{_LONGEST:x}")), length - _FRAME):
            written = b"%x" % size
            if len(written) + _FRAME + size == length:
                line = written + b"\r\n"
        self[length] = line
        return line
