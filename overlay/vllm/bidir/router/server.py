# SPDX-License-Identifier: Apache-2.0
"""From the first request to the last: what serves while a router listens."""

from __future__ import annotations

import asyncio
import signal

from vllm.bidir.router.app import App
from vllm.bidir.router.http.listener import Listener
from vllm.bidir.router.http.reader import Limits
from vllm.bidir.router.router import Router


def listener(router: Router, host: str, port: int) -> Listener:
    """Listens for a router, within its limits."""
    options = router.options
    return Listener(
        App(router),
        Limits(options.max_body, options.security.max_header),
        host,
        port,
        None if router.certificate is None else router.certificate.context,
    )


async def serve(router: Router) -> None:
    """Listen until SIGTERM or SIGINT, then drain. OSError if the port cannot be had."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, router.draining.tell)
    async with router.lifespan():
        listens = listener(router, router.options.host, router.options.port)
        try:
            await listens.start()
            await router.draining.run()
        finally:
            await listens.close()
