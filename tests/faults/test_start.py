"""An engine that cannot take part says so at start, within seconds, and what to change."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults.turns import tokens, turn
from tools.cluster import Cluster, ManagedProcess, PortReservations
from tools.cluster.command import serve_command, serve_environment

# From the first line of the log on; importing and loading is most of it.
START_S = 120.0


def start_third(faulty: Cluster, folder: Path, **changes: Any) -> str:
    """Start an engine beside the two, which must end by itself; its log."""
    spec = faulty.decode[0].spec
    with PortReservations() as ports:
        third = replace(spec, name="third", port=ports.reserve(), **changes)
        process = ManagedProcess(
            "third",
            serve_command(third, "third-engine"),
            folder / "third.log",
            env=serve_environment(third, os.environ),
            cores=spec.slot.cores,
        )
        process.start()
        try:
            end = time.monotonic() + START_S
            while process.is_alive():
                assert time.monotonic() < end, f"still starting after {START_S:.0f} s"
                time.sleep(0.5)
        finally:
            process.stop()
    return (folder / "third.log").read_text(encoding="utf-8", errors="replace")


def test_a_side_channel_port_that_is_taken_ends_the_start(faulty: Cluster, tmp_path: Path) -> None:
    d = faulty.decode[0]
    log = start_third(faulty, tmp_path, side_channel_port=d.side_channel_port)
    assert f"{d.host}:{d.side_channel_port}" in log
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in log
    # Whoever has it goes on.
    turn(faulty, tokens("still there", 200))


def test_an_option_that_cannot_be_meant_ends_the_start(faulty: Cluster, tmp_path: Path) -> None:
    spec = faulty.decode[0].spec
    extra = {**spec.options.decode.kv_connector_extra_config, "bidirectional_kv_xfer": "yes"}
    role = replace(spec.options.decode, kv_connector_extra_config=extra)
    log = start_third(faulty, tmp_path, options=replace(spec.options, decode=role))
    assert "bidirectional_kv_xfer must be true or false" in log
