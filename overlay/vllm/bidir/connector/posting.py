# SPDX-License-Identifier: Apache-2.0
"""READs are handed to NIXL in a thread of their own, so that the engine's step does not wait.

NIXL takes a READ over descriptor by descriptor, some microseconds each, and returns when it has
taken the last: with a block's layers apart, over a hundred milliseconds for 24,000 tokens. It does
so without Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

# So few are posted at once: the way through a thread takes about as long.
INLINE = 32


@dataclass(frozen=True)
class Descriptors:
    """Pairs of NIXL descriptors: what `remote_ids` of the one list describe is read into what
    `local_ids` of the other do, one by one. `notification` is sent to the owner when all is there.
    """

    local_handle: Any
    local_ids: Any
    remote_handle: Any
    remote_ids: Any
    notification: bytes | None = None


class Post:
    """A READ of one request from one rank on its way to NIXL.

    When it has `ended`, `handle` is NIXL's, and `error` says why NIXL did not take it (then there
    may be a handle, to be released).
    """

    def __init__(self, request_id: str, engine_id: str, rank: int) -> None:
        self.request_id, self.engine_id, self.rank = request_id, engine_id, rank
        self.handle: Any = None
        self.error: Exception | None = None
        self.ended = False
        self.given_up = False


class Poster:
    """Posts READs in the order in which they are given. Not for use by several threads."""

    def __init__(self, nixl: Any, prepare: Callable[[], None], shared: bool) -> None:
        """`prepare` is called first in the thread: it may have to choose a device. `shared`:
        whether NIXL's agent may be used in another thread; else all is posted at once."""
        self._nixl = nixl
        self._prepare = prepare
        self._shared = shared
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bidir_post")
        self._posts: dict[str, list[Post]] = {}

    def post(self, post: Post, read: Descriptors) -> None:
        """Post it now or soon: `ended` has it when it has been taken over, or not."""
        self._posts.setdefault(post.request_id, []).append(post)
        if self._shared and len(read.local_ids) > INLINE:
            self._thread.submit(self._take_over, post, read, True)
        else:
            self._take_over(post, read, False)

    def _take_over(self, post: Post, read: Descriptors, elsewhere: bool) -> None:
        more = {} if read.notification is None else {"notif_msg": read.notification}
        try:
            if post.given_up:
                return  # nobody waits for it
            if elsewhere:
                self._prepare()
            post.handle = self._nixl.make_prepped_xfer(
                "READ",
                read.local_handle,
                read.local_ids,
                read.remote_handle,
                read.remote_ids,
                **more,
            )
            self._nixl.transfer(post.handle)
        except Exception as error:
            post.error = error
        finally:
            post.ended = True

    def ended(self) -> list[Post]:
        """Those that have ended since the last call."""
        over = [post for posts in self._posts.values() for post in posts if post.ended]
        for post in over:
            self._posts[post.request_id].remove(post)
            if not self._posts[post.request_id]:
                del self._posts[post.request_id]
        return over

    def waits_for(self, request_id: str) -> bool:
        """Whether a READ of this request is on its way."""
        return request_id in self._posts

    def engines(self) -> set[str]:
        """Engines that a READ on its way is from."""
        return {post.engine_id for posts in self._posts.values() for post in posts}

    def give_up(self, request_id: str) -> list[Post]:
        """Those of this request that are on their way; nothing more is said of them here.

        What has not begun does not begin any more.
        """
        posts = self._posts.pop(request_id, [])
        for post in posts:
            post.given_up = True
        return posts

    def close(self) -> list[Post]:
        """Wait for the one under way, drop the others: what has ended and was not told yet."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        return self.ended()
