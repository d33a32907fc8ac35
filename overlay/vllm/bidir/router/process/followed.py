# SPDX-License-Identifier: Apache-2.0
"""A file that is read again when it has changed, and not while it is being written."""

from __future__ import annotations

import asyncio
from pathlib import Path

# How often a followed file is looked at, in seconds.
LOOK_S = 1.0

_Version = tuple[int, int, int] | None


class FollowedFile:
    """Notices new versions of a file, and of what a link leads to: Kubernetes mounts secrets so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: _Version = None
        self._taken: _Version = None

    async def has_changed(self) -> bool:
        """Once for each version that has looked the same twice: half of a file is a file too.

        A file that is missing is one between two versions of itself. The first version is new.
        """
        try:
            about = await asyncio.to_thread(self.path.stat)
        except OSError:
            return False
        version = (about.st_mtime_ns, about.st_size, about.st_ino)
        stands, self._seen = version == self._seen, version
        if version == self._taken or not stands:
            return False
        self._taken = version
        return True
