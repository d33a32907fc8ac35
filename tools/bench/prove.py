"""The proof that KV was moved: as many bytes as the tokens that were read take, request by request.

A run that was to read back and in which nothing moved has failed; it is not a slow one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.bench.collect import Joined, Run
from tools.bench.servers import READ_BYTES

# P logs megabytes with one digit.
_ROUNDING_BYTES = 50_000


@dataclass(frozen=True)
class Proof:
    """What one arm of one repeat has moved. `problems`: why it is no proof; () if it is one."""

    arm: str
    repeat: int
    requests: int
    reads: int
    tokens_read: int
    bytes_moved: int
    bytes_per_token: int
    block_tokens: int
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.problems


def prove(run: Run) -> Proof:
    """Check one run. Only an arm with `must_move` fails for having read nothing."""
    about = run.about
    per_token, block = int(about["kv_bytes_per_token"]), int(about["block_size"])
    reads = [one for one in run.joined if one.tokens_read]
    return Proof(
        arm=run.arm,
        repeat=run.repeat,
        requests=len(run.joined),
        reads=len(reads),
        tokens_read=sum(one.tokens_read or 0 for one in reads),
        bytes_moved=sum(one.bytes_moved or 0 for one in run.joined),
        bytes_per_token=per_token,
        block_tokens=block,
        problems=tuple(_problems(run, per_token, block)),
    )


def _problems(run: Run, per_token: int, block: int) -> Iterator[str]:
    if run.about["must_move"]:
        if not any(one.tokens_read for one in run.joined):
            yield "nothing moved: no request read any token back"
        missing = sum(bool(one.missing) for one in run.joined)
        if missing:
            yield f"{missing} of {len(run.joined)} requests could not be joined with the logs"
    for one in run.joined:
        expected = (one.tokens_read or 0) * per_token
        moved = one.bytes_moved or 0
        if abs(moved - expected) > block * per_token + _ROUNDING_BYTES:
            yield (
                f"{one.record.request_id}: {moved} bytes moved for {one.tokens_read} tokens, "
                f"expected {expected} within one block ({block * per_token})"
            )
    yield from _against_the_counter(run)


def _against_the_counter(run: Run) -> Iterator[str]:
    """What P's log adds up to is what NIXL has counted in P, if P was asked before it ended."""
    totals = [session.get("totals") for session in run.about.get("sessions", ())]
    if not run.about["must_move"] or not totals or None in totals:
        return
    counted = sum(total[READ_BYTES] for total in totals if total)
    reads = _logged_reads(run.joined)
    if abs(counted - run.logged_bytes) > max(0.01 * counted, (reads + 1) * _ROUNDING_BYTES):
        yield f"P has logged {run.logged_bytes} bytes and counted {counted:.0f}"


def _logged_reads(joined: tuple[Joined, ...]) -> int:
    return sum(bool(one.bytes_moved) for one in joined)
