"""Joins requests with what the router and P wrote about them: by request, never by time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.bench.arms import Front
from tools.bench.errors import BenchError
from tools.bench.logs import (
    ID_LENGTH,
    ReadBacks,
    Routed,
    Router,
    conversation_digest,
    read_prefill,
    read_router,
    read_sample_proxy,
)
from tools.bench.records import Record, read_records, to_line, write_whole

RECORDS = "records.jsonl"
JOINED = "joined.jsonl"
ABOUT = "about.json"
LOGS = "logs"


@dataclass(frozen=True)
class Joined:
    """A record with all that is known of its prefill; None for what is not.

    decision, reason: the router's words, and P's where P has given one. outcome: P's: read,
    recompute, or "" where nothing was offered. Tokens of the prompt: read from D, computed by P.
    missing: what should have been found and was not.
    """

    record: Record
    decision: str = ""
    reason: str = ""
    outcome: str = ""
    prefill_ms: float | None = None
    tokens_verified: int | None = None
    tokens_read: int | None = None
    tokens_computed: int | None = None
    bytes_moved: int | None = None
    hold_ms: float | None = None
    transfer_ms: float | None = None
    confirm_ms: float | None = None
    missing: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """All fields in one object."""
        fields = asdict(self)
        return {**fields.pop("record"), **fields}


@dataclass(frozen=True)
class Run:
    """One arm of one repeat: what it was made with, its requests, P's bytes as P counted them.

    logged_bytes: of all reads that P has logged, others' than these requests included.
    """

    about: Mapping[str, Any]
    joined: tuple[Joined, ...]
    logged_bytes: int = 0

    @property
    def arm(self) -> str:
        return str(self.about["arm"])

    @property
    def repeat(self) -> int:
        return int(self.about["repeat"])


def run_folder(out: Path, arm: str, repeat: int) -> Path:
    """Where the logs of one arm of one repeat are."""
    return out / "runs" / f"{arm}-{repeat}"


def collect(out: Path) -> list[Run]:
    """Join all that a results folder has, and write it to `joined.jsonl`.

    BenchError for a folder without records, and for records of a run that nothing is known about.
    """
    records = read_records(out / RECORDS, torn_end=True)
    by_run: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        by_run.setdefault((record.arm, record.repeat), []).append(record)
    if not by_run:
        raise BenchError("there are no records", file=out / RECORDS, expected="at least one unit")
    runs = [_run(out, run_folder(out, *name), found) for name, found in by_run.items()]
    write_whole(out / JOINED, "".join(to_line(one.as_json()) for run in runs for one in run.joined))
    return runs


def unjoined(runs: Iterable[Run]) -> list[str]:
    """One line per request that could not be joined, and what it lacks."""
    return [
        f"{run.arm}, repeat {run.repeat}: {one.record.request_id} "
        f"({one.record.unit}, turn {one.record.turn}): no {', no '.join(one.missing)}"
        for run in runs
        for one in run.joined
        if one.missing
    ]


def _run(out: Path, folder: Path, records: Sequence[Record]) -> Run:
    about = read_about(folder)
    front: Front = about["front"]
    read_backs = ReadBacks()
    if front == "router":
        router = read_router(_logs(out, folder, "router.log"))
        turns = [(record, _routed(record, router)) for record in records]
        joined = [_router_turn(record, routed, about) for record, routed in turns]
        if about["bidirectional"]:
            names = {_name(record, routed) for record, routed in turns}
            read_backs = read_prefill(_logs(out, folder, "prefill*.log"), names - {""})
            joined = [
                _with_read_back(one, _name(*turn), read_backs)
                for one, turn in zip(joined, turns, strict=True)
            ]
    elif front == "sample-proxy":
        proxied = read_sample_proxy(_logs(out, folder, "proxy.log"))
        joined = [_proxy_turn(r, proxied.get((r.conversation_id, r.turn))) for r in records]
    else:
        joined = [Joined(record) for record in records]
    logged = sum(one.bytes_moved for one in read_backs.every)
    return Run(about, tuple(joined), logged)


def _routed(record: Record, router: Router) -> Routed | None:
    if record.request_id:
        return router.by_request.get(record.request_id[:ID_LENGTH])
    # The base release's benchmark gives no ids; each of its runs is a tenant of its own.
    tenant, _, conversation = record.conversation_id.partition("/")
    return router.of_turn(conversation_digest(f"Bearer {tenant}", conversation), record.turn)


def _name(record: Record, routed: Routed | None) -> str:
    """The request's id: its client's, else the router's."""
    return record.request_id or (routed.request_id if routed else "")


def read_about(folder: Path) -> dict[str, Any]:
    """What a run was made with; BenchError, naming the file, if that is not known."""
    path = folder / ABOUT
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(
            "it is not known what a run was made with",
            file=path,
            expected="a JSON object that the run has written",
            found=error,
            next_step="copy the whole results folder, runs/ included",
        ) from error
    return about


def _router_turn(record: Record, routed: Routed | None, about: Mapping[str, Any]) -> Joined:
    if routed is None:
        return Joined(record, missing=("line of the router",))
    alone = routed.decision == "alone"
    # Without a prefix cache P computes what it does not read.
    computed = None if alone or about["prefill_cache"] else record.input_num_tokens
    return Joined(
        record,
        decision=routed.decision,
        reason=routed.reason,
        prefill_ms=routed.prefill_ms,
        tokens_read=0,
        tokens_computed=computed,
        bytes_moved=0,
        missing=() if alone or routed.prefill_ms is not None else ("prefill of the router",),
    )


def _with_read_back(joined: Joined, name: str, read_backs: ReadBacks) -> Joined:
    found = read_backs.by_request.get(name)
    if found is None:
        lacks = ("decision of P",) if joined.decision == "hit" else ()
        return Joined(**{**vars(joined), "missing": (*joined.missing, *lacks)})
    missing = joined.missing
    if name in read_backs.repeated:
        missing = (*missing, "single decision of P")
    return Joined(
        **{
            **vars(joined),
            "reason": found.reason or joined.reason,
            "outcome": found.outcome,
            "tokens_verified": found.verified,
            "tokens_read": found.read,
            "tokens_computed": found.computed,
            "bytes_moved": found.bytes_moved,
            "hold_ms": found.hold_ms,
            "transfer_ms": found.transfer_ms,
            "confirm_ms": found.confirm_ms,
            "missing": missing,
        }
    )


def _proxy_turn(record: Record, routed: Routed | None) -> Joined:
    if routed is None:
        return Joined(record, missing=("line of the sample proxy",))
    missing = () if routed.prefill_ms is not None else ("prefill of the sample proxy",)
    return Joined(record, decision=routed.decision, prefill_ms=routed.prefill_ms, missing=missing)


def _logs(out: Path, folder: Path, pattern: str) -> str:
    """The text of a run's logs; without any of its own, those that all runs share.

    Nothing when there are no such logs, so that every request lacks its line.
    """
    paths = sorted(folder.glob(pattern)) or sorted((out / LOGS).glob(pattern))
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
