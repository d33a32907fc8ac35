"""What an engine has counted of its transfers, and what P's log says of one read-back."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tools.bench.logs import client_id, read_back_fields
from tools.demo.metrics import Reading, read_metrics

_WAIT_S = 1.0
_POLL_S = 0.04
_BYTES = "vllm:nixl_bytes_transferred_sum"
_USAGE = "vllm:kv_cache_usage_perc"
_CACHE = "vllm:cache_config_info"


@dataclass(frozen=True)
class Transfer:
    """Growth of an engine's counters over one request.

    transfer_ms: of all its reads, from the first descriptor to the last byte. post_ms: of that,
    handing the descriptors to NIXL.
    """

    reads: int
    transfer_ms: float
    post_ms: float
    bytes: int
    descriptors: int
    failed: int


def transfer(before: Reading, after: Reading) -> Transfer:
    """What was transferred between two readings of the receiving engine."""

    def grown(name: str) -> float:
        return after.growth(before, f"vllm:nixl_{name}")

    return Transfer(
        reads=round(grown("xfer_time_seconds_count")),
        transfer_ms=round(grown("xfer_time_seconds_sum") * 1e3, 3),
        post_ms=round(grown("post_time_seconds_sum") * 1e3, 3),
        bytes=round(grown("bytes_transferred_sum")),
        descriptors=round(grown("num_descriptors_sum")),
        failed=round(grown("num_failed_transfers_total")),
    )


def settled(url: str, before: Reading, expected: bool = True) -> Reading:
    """The engine's counters once they have stopped moving: some come a moment late.

    `expected`: whether anything was transferred; waits a second for it at most.
    """
    end = time.monotonic() + _WAIT_S
    last = read_metrics(url)
    while expected and time.monotonic() < end:
        time.sleep(_POLL_S)
        now = read_metrics(url)
        if now.growth(before, _BYTES) > 0 and now.growth(last, _BYTES) == 0:
            return now
        last = now
    return last


def kv_usage(url: str) -> float:
    """Share of the KV cache that is in use, as the engine has said last; 0 to 1."""
    return read_metrics(url).total(_USAGE)


def kv_capacity(url: str) -> tuple[int, int]:
    """Tokens that the engine's KV cache takes, and tokens per block; zeros if it does not say."""
    for sample in read_metrics(url).samples:
        if sample.name == _CACHE:
            size, count = sample.label("block_size"), sample.label("num_gpu_blocks")
            if size.isdigit() and count.isdigit():
                return int(size) * int(count), int(size)
    return 0, 0


class PrefillLog:
    """P's log, read on as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read_back(self, request_id: str) -> dict[str, str]:
        """The fields of the line about that request; empty if there is none within a second."""
        end = time.monotonic() + _WAIT_S
        while True:
            for fields in self._lines():
                if client_id(fields.get("req", ""), {request_id}) is not None:
                    return fields
            if time.monotonic() > end:
                return {}
            time.sleep(_POLL_S)

    def _lines(self) -> list[dict[str, str]]:
        """Fields of all lines about read-backs that were written since the last call."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = map(read_back_fields, whole.decode("utf-8", errors="replace").splitlines())
        return [fields for fields in found if fields is not None]
