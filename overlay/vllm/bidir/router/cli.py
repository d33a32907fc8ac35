# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-bidir-router`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from vllm.bidir.router.options import RouterOptions, parse
from vllm.bidir.router.process.runtime import (
    calm_garbage_collector,
    open_many_files,
    return_memory,
    run,
)
from vllm.bidir.router.router import Router
from vllm.bidir.router.server import serve
from vllm.bidir.router.telemetry.log_lines import Lines, LogLines
from vllm.bidir.router.telemetry.trace_options import TracingError
from vllm.bidir.router.turns.turn import said

logger = logging.getLogger("vllm_bidir_router")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM, and 0 then; exit 1 if the port cannot be had, traces not be
    made, or what runs beside the requests has failed."""
    options = parse(argv)
    lines = LogLines(sys.stderr)
    lines.setFormatter(Lines("%(levelname)s %(asctime)s [router] %(message)s", "%m-%d %H:%M:%S"))
    logging.basicConfig(handlers=[lines], level=logging.INFO)
    # Else somebody else has set up logging, and wants these lines, too.
    said.through = lines if lines in logging.getLogger().handlers else None
    # The format has no use for them, and looking them up costs an eighth of a line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # as logging's HOWTO says: nobody asks from where a line comes
    try:
        return 0 if _serve(options) else 1
    except TracingError as error:
        logger.error("%s", error)
        return 1
    except OSError as error:
        logger.error(
            "cannot listen on %s:%d: %s; choose another with --host or --port",
            options.host,
            options.port,
            error.strerror,
        )
        return 1


def _serve(options: RouterOptions) -> bool:
    """Whether it was told to end."""
    logger.info(
        "listening on %s:%d; prefill: %s; decode: %s",
        options.host,
        options.port,
        ", ".join(map(str, options.prefill)) or "none",
        ", ".join(map(str, options.decode)) or "none",
    )
    open_many_files()
    calm_garbage_collector()
    return_memory()
    router = Router(options)
    run(serve(router))
    return not router.failed
