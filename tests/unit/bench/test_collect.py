"""Joining records with logs: by request, whatever the order of the lines."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.unit.bench.made import about, record
from tools.bench.collect import ABOUT, JOINED, LOGS, RECORDS, Joined, collect, run_folder, unjoined
from tools.bench.errors import BenchError
from tools.bench.logs import client_id, conversation_digest, read_router
from tools.bench.records import Record, to_line

ROUTER = "INFO 11-29 18:00:00 [router] "
P = "(EngineCore pid=7) INFO 11-29 18:00:00 [scheduler.py:300] "


def routed(name: str, digest: str = "ab", hit: bool = True, ms: float = 40) -> list[str]:
    looked = "HIT (10.0.0.2:8200)" if hit else "MISS (first_turn)"
    start = f"{ROUTER}[{name}] conv={digest}: "
    return [f"{start}cache {looked}", f"{start}Prefill done in {ms:.0f}ms (10.0.0.1:8100)"]


def read_back(name: str, tokens: int = 640, kind: str = "cmpl") -> str:
    number = "-0" if kind == "cmpl" else ""
    return (
        f"{P}read-back req={kind}-{name}{number}-0a1b2c3d peer=decode-0 prompt=700 local=0 "
        f"verified={tokens} read={tokens} computed={700 - tokens} blocks=5 mb=5.2 hold_ms=1.5 "
        "transfer_ms=8.2 confirm_ms=0.4 outcome=read"
    )


def refused(name: str) -> str:
    return (
        f"{P}read-back req=cmpl-{name}-0-0a1b2c3d peer=decode-0 prompt=700 local=0 verified=0 "
        "read=0 computed=700 outcome=recompute reason=diverged"
    )


def results(out: Path, records: list[Record], **logs: list[str]) -> Path:
    """A results folder; `router` and `prefill` are lines of these logs."""
    out.mkdir(parents=True, exist_ok=True)
    (out / RECORDS).write_text("".join(to_line(asdict(one)) for one in records))
    for arm, repeat in {(one.arm, one.repeat) for one in records}:
        folder = run_folder(out, arm, repeat)
        folder.mkdir(parents=True)
        (folder / ABOUT).write_text(json.dumps(about(arm, repeat)))
        for name, lines in logs.items():
            (folder / f"{name.replace('_', '-')}.log").write_text("\n".join(lines) + "\n")
    return out


def by_id(out: Path) -> dict[str, Joined]:
    return {one.record.request_id: one for run in collect(out) for one in run.joined}


def test_lines_in_any_order_reach_their_own_request(tmp_path: Path) -> None:
    """Requests that overlap in time, ids that begin with one another."""
    names = [f"abc-{n}" for n in range(1, 24)]
    router = [line for n, name in enumerate(names) for line in routed(name, ms=100 + n)]
    prefill = [read_back(name, 128 + n) for n, name in enumerate(names)]
    random.Random(1).shuffle(router)
    random.Random(2).shuffle(prefill)
    records = [record(request_id=name, turn=n) for n, name in enumerate(names)]
    found = by_id(results(tmp_path / "o", records, router=router, prefill_0=prefill))
    for n, name in enumerate(names):
        assert (found[name].prefill_ms, found[name].tokens_read) == (100 + n, 128 + n)
        assert found[name].missing == ()


def test_all_that_p_said_is_in_the_joined_record(tmp_path: Path) -> None:
    out = results(
        tmp_path / "o", [record(request_id="a-1")], router=routed("a-1"), prefill=[read_back("a-1")]
    )
    collect(out)
    (line,) = (out / JOINED).read_text().splitlines()
    fields = json.loads(line)
    expected = {
        "ttft_ms": 100.0,
        "decision": "hit",
        "outcome": "read",
        "tokens_read": 640,
        "tokens_computed": 60,
        "bytes_moved": 5_200_000,
        "hold_ms": 1.5,
        "transfer_ms": 8.2,
        "confirm_ms": 0.4,
    }
    assert {name: fields[name] for name in expected} == expected


def test_a_refused_read_back_has_ps_reason(tmp_path: Path) -> None:
    out = results(
        tmp_path / "o", [record(request_id="a-1")], router=routed("a-1"), prefill=[refused("a-1")]
    )
    one = by_id(out)["a-1"]
    assert (one.decision, one.outcome, one.reason) == ("hit", "recompute", "diverged")
    assert (one.tokens_read, one.tokens_computed) == (0, 700)


def test_what_could_not_be_joined_is_named(tmp_path: Path) -> None:
    """No line at all, no line of P after a hit, no prefill, and two lines of P."""
    records = [record(request_id=f"a-{n}", turn=n) for n in (1, 2, 3, 4, 5)]
    router = [*routed("a-2"), routed("a-3")[0], *routed("a-4"), *routed("a-5", hit=False)]
    prefill = [read_back("a-3"), read_back("a-4"), refused("a-4")]
    runs = collect(results(tmp_path / "o", records, router=router, prefill=prefill))
    missing = {one.record.request_id: one.missing for one in runs[0].joined}
    assert missing == {
        "a-1": ("line of the router",),
        "a-2": ("decision of P",),
        "a-3": ("prefill of the router",),
        "a-4": ("single decision of P",),
        "a-5": (),
    }
    lines = unjoined(runs)
    assert len(lines) == 4
    assert lines[0] == "on, repeat 0: a-1 (sweep-700, turn 1): no line of the router"


def test_a_broken_log_loses_only_the_broken_lines(tmp_path: Path) -> None:
    records = [record(request_id=f"a-{n}", turn=n) for n in (1, 2)]
    router = [
        *routed("a-1"),
        "\x00\udcff half a li".encode(errors="replace").decode(),
        *routed("a-2"),
    ]
    prefill = [read_back("a-1")[:90], read_back("a-2")]
    found = by_id(results(tmp_path / "o", records, router=router, prefill=prefill))
    assert found["a-1"].missing == ("decision of P",)
    assert found["a-2"].missing == () and found["a-2"].tokens_read == 640


def test_a_p_that_does_not_verify_is_seen(tmp_path: Path) -> None:
    withheld = f"{ROUTER}[a-1] conv=ab: 10.0.0.1:8100 does not verify read-backs; it computes"
    router = [routed("a-1")[0], withheld, routed("a-1")[1]]
    out = results(tmp_path / "o", [record(request_id="a-1")], router=router)
    one = by_id(out)["a-1"]
    assert (one.decision, one.tokens_read, one.missing) == ("withheld", 0, ())


def test_logs_beside_the_results_serve_all_runs(tmp_path: Path) -> None:
    """As copied from other hosts: one log of a router that has served every repeat."""
    records = [record(request_id=f"a-{n}", repeat=n) for n in (0, 1)]
    out = results(tmp_path / "o", records)
    (out / LOGS).mkdir()
    (out / LOGS / "router.log").write_text("\n".join(routed("a-0") + routed("a-1")))
    (out / LOGS / "prefill.log").write_text(read_back("a-0") + "\n" + read_back("a-1"))
    assert all(not one.missing for one in by_id(out).values())


def test_the_base_benchmarks_requests_are_found_by_conversation_and_turn(tmp_path: Path) -> None:
    """It sends no request ids; its conversations have the same ids in every one of its runs."""
    router: list[str] = []
    prefill: list[str] = []
    records = []
    for tenant, tokens in (("on-0-2048", 200), ("on-0-4096", 300)):
        digest = conversation_digest(f"Bearer {tenant}", "CONV_ID_0")
        for turn in (1, 2):
            name = f"5f8e-{tenant}-{turn}"
            router += routed(name, digest, hit=turn == 2)
            if turn == 2:
                prefill.append(read_back(name, tokens, kind="chatcmpl"))
            records.append(
                record(
                    request_id="",
                    conversation_id=f"{tenant}/CONV_ID_0",
                    phase="base",
                    unit=f"base-{tenant[-4:]}",
                    turn=turn,
                )
            )
    runs = collect(results(tmp_path / "o", records, router=router, prefill=prefill))
    assert unjoined(runs) == []
    read = {(one.record.unit, one.record.turn): one.tokens_read for one in runs[0].joined}
    assert read == {
        ("base-2048", 1): 0,
        ("base-2048", 2): 200,
        ("base-4096", 1): 0,
        ("base-4096", 2): 300,
    }


def test_the_sample_proxys_turns_are_found_by_conversation_and_number(tmp_path: Path) -> None:
    """It makes request ids of its own, and names conversations as they are."""
    name = "2026-01-01 00:00:00 [INFO] disagg_proxy: "
    ids = ["11111111-2222-3333-4444-55555555555" + end for end in "12"]
    lines = [
        f"{name}[{ids[0]}] conv=c-1: cache MISS",
        f"{name}[{ids[1]}] conv=c-1: sending D's cached blocks to P (remote_request_id=x)",
        f"{name}[{ids[1]}] Prefill done in 30ms",
        f"{name}[{ids[0]}] Prefill done in 90ms",
    ]
    records = [
        record(arm="stock", request_id=f"a-{turn}", conversation_id="c-1", turn=turn)
        for turn in (1, 2, 3)
    ]
    found = by_id(results(tmp_path / "o", records, proxy=lines))
    assert [(found[f"a-{n}"].decision, found[f"a-{n}"].prefill_ms) for n in (1, 2)] == [
        ("miss", 90.0),
        ("hit", 30.0),
    ]
    assert found["a-3"].missing == ("line of the sample proxy",)


def test_one_engine_has_nothing_to_be_joined_with(tmp_path: Path) -> None:
    assert by_id(results(tmp_path / "o", [record(arm="single")]))["a1b2c3d4-000001"].missing == ()


def test_missing_and_empty_results_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"records\.jsonl"):
        collect(tmp_path)
    (tmp_path / RECORDS).touch()
    with pytest.raises(BenchError, match="there are no records"):
        collect(tmp_path)
    out = results(tmp_path / "o", [record()])
    (run_folder(out, "on", 0) / ABOUT).unlink()
    with pytest.raises(BenchError, match=r"about\.json"):
        collect(out)


def test_the_engines_additions_to_an_id_are_taken_off_whatever_it_looks_like() -> None:
    known = {"a", "a-0", "a-0-1", "x-y"}
    assert client_id("cmpl-a-0-0a1b2c3d", known) == "a-0"  # a chat's id would be the same text
    assert client_id("cmpl-a-0-1-0-0a1b2c3d", known) == "a-0-1"
    assert client_id("chatcmpl-x-y-0a1b2c3d", known) == "x-y"
    assert client_id("cmpl-b-0-0a1b2c3d", known) is None


def test_failed_legs_and_bypasses_are_read() -> None:
    text = "\n".join(
        [
            f"{ROUTER}[a] conv=-: decode node alone (bypass_n)",
            f"{ROUTER}[b] conv=cd: cache MISS (expired)",
            f"WARNING {ROUTER}[b] conv=cd: prefill leg failed on 10.0.0.1:8100: TimeoutError",
        ]
    )
    found = read_router(text).by_request
    assert (found["a"].decision, found["a"].reason) == ("alone", "bypass_n")
    assert (found["b"].decision, found["b"].reason, found["b"].failed_legs) == (
        "miss",
        "expired",
        1,
    )
