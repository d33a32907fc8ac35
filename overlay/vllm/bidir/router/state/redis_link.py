# SPDX-License-Identifier: Apache-2.0
"""One router's link to Redis: bounded in time, and left alone while it is broken.

The first exchange that fails opens a circuit: from then on nothing is asked, and nobody waits,
until Redis has answered a PING. There is one log line when that happens and one when it is over.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.bidir.router.process.in_time import in_time
from vllm.bidir.router.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import Pipeline

logger = logging.getLogger("vllm_bidir_router")

Result = TypeVar("Result")

_CONNECTIONS = 32
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# What goes wrong with every turn is said this often.
_SAY_AGAIN_S = 60.0


class RedisLink:
    """`url` may hold a password, and is never shown. `timeout_s` bounds an attempt as a whole."""

    def __init__(self, url: str, timeout_s: float, metrics: Metrics) -> None:
        # Imported where it is used: routers that are alone need not have it.
        from redis import exceptions
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._redis: Redis = Redis.from_pool(pool)
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._up = False
        self._failed = asyncio.Event()
        self._said: dict[str, float] = {}
        self._where = _where(pool.connection_kwargs)
        self._refused = exceptions.ResponseError
        self._broken = (exceptions.RedisError, asyncio.TimeoutError, OSError)
        self._late = (exceptions.TimeoutError, asyncio.TimeoutError)

    async def start(self) -> None:
        """Look whether it is there, for no longer than an attempt may take."""
        if await self._answers():
            self._set_up(True)
        else:
            self._failed.set()

    async def run(self) -> None:
        """Ask for it again and again while it is away, until cancelled."""
        while True:
            await self._failed.wait()
            pause = _FIRST_PAUSE_S
            while not self._up:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                if await self._answers():
                    self._failed.clear()
                    self._set_up(True)
                    logger.info("the state in Redis (%s) can be used again", self._where)

    async def close(self) -> None:
        """Close all connections; those that cannot be closed end with the process."""
        with suppress(*self._broken):
            await self._redis.aclose()

    async def attempt(self, work: Callable[[], Awaitable[Result]]) -> Result | None:
        """What `work` gives, which may exchange several times; None if it cannot be had in time.

        Nothing is raised but what is no fault of Redis.
        """
        if not self._up:
            self._metrics.state_failure("skipped")
            return None
        begun = time.monotonic()
        try:
            result = await in_time(work(), self._timeout_s)
        except self._refused as error:
            self.complain("refused", type(error).__name__)
        except self._broken as error:
            kind = "timeout" if isinstance(error, self._late) else "connection"
            self._metrics.state_failure(kind)
            self._break(type(error).__name__)
        else:
            self._metrics.state_seconds.observe(time.monotonic() - begun)
            return result
        return None

    async def exchange(self, fill: Callable[[Pipeline], Any]) -> list[Any]:
        """Send what `fill` puts into a pipeline: the answers, None for those that are errors."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            fill(pipeline)
            answers = await pipeline.execute(raise_on_error=False)
        return [self._unless_refused(answer) for answer in answers]

    def complain(self, kind: str, about: str) -> None:
        """Count something that is wrong in or with Redis, and log it now and then."""
        self._metrics.state_failure(kind)
        now = time.monotonic()
        if now >= self._said.get(kind, 0.0):
            self._said[kind] = now + _SAY_AGAIN_S
            what = "refuses what it is asked" if kind == "refused" else "holds what is no state"
            logger.warning("the state in Redis (%s) %s: %s", self._where, what, about)

    def _unless_refused(self, answer: Any) -> Any:
        if not isinstance(answer, self._refused):
            if isinstance(answer, Exception):
                raise answer
            return answer
        # The text may repeat what was sent; its first word is Redis' own.
        word = str(answer).partition(" ")[0]
        self.complain("value" if word == "WRONGTYPE" else "refused", type(answer).__name__)
        return None

    async def _answers(self) -> bool:
        try:
            await in_time(self._redis.ping(), self._timeout_s)
        except self._broken as error:
            self._break(type(error).__name__)
            return False
        return True

    def _set_up(self, up: bool) -> None:
        self._up = up
        self._metrics.state_up.set(up)

    def _break(self, kind: str) -> None:
        if self._failed.is_set():
            return
        self._set_up(False)
        self._failed.set()
        hint = "; does its URL name its password?" if "Authentication" in kind else ""
        logger.warning(
            "the state in Redis (%s) cannot be used: %s%s; this router goes by its own memory, "
            "and asks again",
            self._where,
            kind,
            hint,
        )


def _where(options: dict[str, Any]) -> str:
    """Which Redis, without the secrets in its URL."""
    path = options.get("path")
    place = path or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return f"{place} db {options.get('db', 0)}"
