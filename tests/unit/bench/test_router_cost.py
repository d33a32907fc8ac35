"""The router's benchmark: what its engines send, what its client checks, what its table says."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.router.redis_server import RedisServer
from tools.bench.errors import BenchError
from tools.bench.router import load as load_module
from tools.bench.router import yardstick
from tools.bench.router.arguments import parse
from tools.bench.router.client import Connection as ClientConnection
from tools.bench.router.client import Reply, unchunked
from tools.bench.router.engines import Connection, Engines, _Stream
from tools.bench.router.figures import Memory, Sample, as_json, quantile, verdicts
from tools.bench.router.load import BothLegs, Load, Slice, check, measure, of_slices
from tools.bench.router.script import decode_params, encoded, request_body
from tools.bench.router.table import report

ROOT = Path(__file__).resolve().parents[3]
CHUNKS = 4


async def one_turn(interval_ms: float = 0.0, lease_s: float | None = None) -> Reply:
    """A turn of a client that makes both calls itself, over engines in this process."""
    engines, loop = Engines(100, lease_s), asyncio.get_running_loop()
    async with (
        await loop.create_server(lambda: Connection(engines.prefill), "127.0.0.1", 0) as prefill,
        await loop.create_server(lambda: Connection(engines.decode), "127.0.0.1", 0) as decode,
    ):
        ports = [server.sockets[0].getsockname()[1] for server in (prefill, decode)]
        client = BothLegs(*ports)
        reply = await client(request_body("c", CHUNKS, interval_ms, 100))
        client.close()
    return reply


async def test_d_streams_as_many_events_as_are_asked_for_and_says_what_it_keeps() -> None:
    reply = await one_turn(lease_s=60.0)
    check(reply, CHUNKS)
    events = unchunked(reply.body).split(b"\n\n")
    chunks = [json.loads(one[len(b"data: ") :]) for one in events[:-2]]
    kept = [chunk.get("kv_transfer_params") for chunk in chunks]
    assert [one is not None for one in kept] == [False] * (CHUNKS - 1) + [True, False]
    assert kept[CHUNKS - 1]["lease_id"] == f"d0-{1:032x}" and kept[CHUNKS - 1]["lease_duration"]
    assert chunks[CHUNKS - 1]["choices"][0]["finish_reason"] == "stop"


async def test_paced_events_come_at_their_interval() -> None:
    reply = await one_turn(interval_ms=20.0)
    assert 3 * 0.020 <= reply.ended - reply.first < 1.0
    assert reply.begun < reply.first


async def test_in_steps_all_streams_get_their_events_at_the_same_times() -> None:
    """Whenever each has begun."""

    class Noting(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def write(self, data: Any) -> None:
            self.times.append(asyncio.get_running_loop().time())

        def is_closing(self) -> bool:
            return False

    streams = [Noting(), Noting()]
    for stream in streams:
        _Stream(stream, b"first", [b"event"] * 5, 0.02, steps=True)
        await asyncio.sleep(0.013)
    await asyncio.sleep(0.15)
    assert [len(stream.times) for stream in streams] == [6, 6]
    # The first comes at once, the last two right behind the last token.
    late = [at % 0.02 for stream in streams for at in stream.times[1:4]]
    assert all(seconds < 0.01 for seconds in late), late


async def test_a_stream_that_lacks_an_event_is_no_result() -> None:
    reply = await one_turn()
    with pytest.raises(BenchError, match=r"not whole[\s\S]*expected +7 events"):
        check(reply, CHUNKS + 1)
    with pytest.raises(BenchError, match="answered 502"):
        check(replace(reply, status=502), CHUNKS)
    with pytest.raises(BenchError, match="chunks are broken"):
        check(replace(reply, body=b"data: not chunked"), CHUNKS)


class Wire(asyncio.Transport):
    """Keeps what a client sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)


@pytest.mark.parametrize("size", [1, 2, 5, 7, 10_000])
@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\n", b"gone"),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)
async def test_the_client_reads_answers_in_any_pieces(size: int, head: bytes, body: bytes) -> None:
    client, wire, whole = ClientConnection(), Wire(), head + body
    client.connection_made(wire)
    asking = asyncio.create_task(client.post("/v1/x", b"{}"))
    await asyncio.sleep(0)
    assert wire.sent.startswith(b"POST /v1/x HTTP/1.1\r\n") and wire.sent.endswith(b"\r\n\r\n{}")
    for start in range(0, len(whole), size):
        assert not asking.done()
        client.data_received(whole[start : start + size])
    reply = await asking
    assert reply.status == int(head.split()[1]) and reply.body == body


async def test_a_connection_that_ends_in_an_answer_is_an_error() -> None:
    client = ClientConnection()
    client.connection_made(Wire())
    asking = asyncio.create_task(client.post("/", b"{}"))
    await asyncio.sleep(0)
    client.connection_lost(None)
    with pytest.raises(BenchError, match="not answered whole"):
        await asking
    assert client.closed


def test_a_history_of_a_thousand_tokens_has_params_of_some_kilobytes() -> None:
    assert 2_000 < len(encoded(decode_params(1000))) < 3_000
    proof = decode_params(100_000)["prefix_proof"]
    indexes = [index for index, _ in proof["checkpoints"]]
    assert len(indexes) == 128 and indexes == sorted(set(indexes))
    assert indexes[-1] == 100_000 // 16 - 1


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1)])
def test_a_quantile_is_one_of_the_values(share: float, expected: float) -> None:
    assert quantile([float(value) for value in range(100, 0, -1)], share) == expected


async def test_cpu_per_stream_is_that_of_the_process_between() -> None:
    engines, loop = Engines(100, None), asyncio.get_running_loop()
    async with (
        await loop.create_server(lambda: Connection(engines.prefill), "127.0.0.1", 0) as prefill,
        await loop.create_server(lambda: Connection(engines.decode), "127.0.0.1", 0) as decode,
    ):
        ports = [server.sockets[0].getsockname()[1] for server in (prefill, decode)]
        load = Load(2, CHUNKS, 0.0, 100, seconds=0.5, warm_s=0.1)
        sample = await measure(lambda: BothLegs(*ports), load, os.getpid(), os.getpid())
    assert sample.streams > 0 and len(sample.first_ms) >= sample.streams - 2
    assert 0 < sample.cpu_ms < 100 and 0.2 < sample.seconds < 2
    assert all(
        first <= whole for first, whole in zip(sample.first_ms, sample.whole_ms, strict=True)
    )


def reply(begun: float, ended: float) -> Reply:
    return Reply(begun, begun + 0.001, ended, 200, b"")


def test_what_others_disturb_is_left_out() -> None:
    slices = [Slice(0, 1, 0.1, 0.2, 0.0), Slice(1, 2, 0.9, 0.9, 0.3), Slice(2, 3, 0.3, 0.4, 0.05)]
    replies = [reply(0.1, 0.2), reply(0.3, 1.5), reply(1.6, 2.1), reply(2.2, 2.9), reply(2.5, 3.5)]
    found = of_slices(slices, replies, 3)
    assert (found.streams, len(found.first_ms), found.seconds) == (3, 2, 2)
    assert found.cpu_s == pytest.approx(0.4) and found.load_share == pytest.approx(0.3)
    assert found.undisturbed == pytest.approx(2 / 3)


def test_where_others_never_rest_all_counts_and_is_said() -> None:
    slices = [Slice(0, 1, 0.1, 0.2, 0.5), Slice(1, 2, 0.1, 0.2, 0.3)]
    found = of_slices(slices, [reply(0.1, 1.2)], 2)
    assert (found.streams, found.seconds, found.undisturbed) == (1, 2, 0)
    with pytest.raises(BenchError, match="no stream came to its end"):
        of_slices(slices, [reply(1.9, 2.1)], 2)


def test_where_others_leave_less_than_a_stream_all_counts_and_is_said() -> None:
    slices = [Slice(0, 1, 0.1, 0.2, 0.5), Slice(1, 2, 0.1, 0.2, 0.0)]
    found = of_slices(slices, [reply(0.1, 1.2)], 2)
    assert (found.streams, found.seconds, found.undisturbed) == (1, 2, 0.5)
    found = of_slices(slices, [reply(0.1, 0.9)], 2)
    assert (found.streams, found.seconds, found.undisturbed) == (1, 2, 0.5)


def sample(first_ms: float, cpu_ms: float) -> dict[str, Any]:
    made = Sample(100, 10.0, (first_ms,) * 100, (first_ms + 900,) * 100, cpu_ms / 10, 0.3)
    return as_json(made)


def results(ours_first_ms: float, ours_cpu_ms: float, mb: float, **changed: Any) -> dict[str, Any]:
    arms = {
        "direct": [sample(1.0, 0.0)] * 2,
        "ours": [sample(ours_first_ms, ours_cpu_ms)] * 2,
        "sample proxy": [sample(9.0, 12.0)] * 2,
    }
    return {
        "settings": {
            "concurrency": 64,
            "chunks": 50,
            "interval_ms": 20.0,
            "prompt_bytes": 4096,
            "turn_tokens": 1000,
            "repeats": 2,
        },
        "versions": {"python": "3.11", "vllm": "0.29.0"},
        "hardware": {"cpu": "a processor", "cores": 2},
        "samples": {"steps": arms, "paced": arms, "saturated": arms},
        "memory": {
            "conversations": 100_000,
            "turn_tokens": 1000,
            "before_mb": 40.0,
            "after_mb": mb,
        },
        "warnings": [],
        **changed,
    }


def said(data: dict[str, Any]) -> list[bool]:
    found = verdicts(data["samples"], Memory(**data["memory"]), data["settings"]["concurrency"])
    return [one.met for one in found]


def test_what_is_required_is_met_or_not() -> None:
    """CPU with each load, both latencies with both loads that have pauses, memory."""
    assert said(results(2.0, 2.0, 120.0)) == [True] * 8
    assert said(results(2.1, 2.0, 120.0)) == [True] * 3 + [False, True] * 2 + [True]
    assert said(results(6.1, 2.0, 120.0)) == [True] * 3 + [False] * 4 + [True]
    assert said(results(2.0, 2.1, 120.0)) == [False] * 3 + [True] * 5
    assert said(results(2.0, 2.0, 120.1)) == [True] * 7 + [False]


def test_what_is_just_not_met_does_not_look_as_if_it_were() -> None:
    text = report(results(2.0, 12 / 5.97, 120.0))
    assert text.count(" 5.9x ") == 3 and " 6.0x " not in text


def test_a_smaller_load_meets_nothing() -> None:
    data = results(2.0, 2.0, 120.0)
    data["settings"]["concurrency"] = 63
    data["memory"]["conversations"] = 99_999
    assert said(data) == [True] * 3 + [False] * 5


def test_the_report_shows_what_an_arm_adds_and_what_is_not_met() -> None:
    text = report(results(3.5, 2.0, 140.0, warnings=["warning: busy"]))
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    adds = [row for row in rows if row[1:2] == ["ours adds"]]
    assert [one[2:4] for one in adds] == [["2.50 ms", "2.50 ms"]] * 2
    assert sum(row[-2] == "NOT MET" for row in rows if len(row) > 2) == 3
    assert "1000 bytes each" in text and "warning: busy" in text


def test_the_report_says_how_fast_the_machine_was_and_whether_that_changed() -> None:
    data = results(2.0, 2.0, 120.0)
    assert "Yardstick" not in report(data)
    for spread, steady in ((1.2, True), (1.3, False)):
        for arms in data["samples"].values():
            for rows in arms.values():
                rows[:] = [{**rows[0], "yardstick_ms": ms} for ms in (1.0, spread)]
        text = report(data)
        assert f"took 1.00-{spread:.2f} ms" in text
        assert ("run it again" not in text) is steady


def test_what_a_slower_machine_gave_is_left_out() -> None:
    slices = [Slice(0, 1, 0.1, 0.2, 0.0, 1.2), Slice(1, 2, 0.9, 0.9, 0.0, 1.9)]
    replies = [reply(0.1, 0.2), reply(1.1, 1.2), reply(1.3, 1.4)]
    found = of_slices(slices, replies, 1, calm_ms=1.3)
    assert (found.streams, found.cpu_ms, found.undisturbed) == (1, 100, 1)
    assert found.yardstick_ms == 1.2
    found = of_slices(slices, replies, 2)
    assert (found.streams, found.undisturbed) == (3, 1)
    assert as_json(found)["yardstick_ms"] == pytest.approx(1.55)


@pytest.mark.parametrize(
    ("calm_ms", "slowly", "slices"), [(1.3, 3, 5), (1.3, 99, 10), (math.inf, 99, 2)]
)
async def test_it_goes_on_until_enough_is_calm_but_not_for_ever(
    calm_ms: float, slowly: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of slices of 0.1 s two are wanted, and the first so many are slow."""
    monkeypatch.setattr(load_module, "_SLICE_S", 0.1)
    looked = 0

    def yardstick() -> float:
        nonlocal looked
        looked += 1
        return 1.9 if looked <= slowly + 1 else 1.2  # it is asked once before

    engines, loop = Engines(100, None), asyncio.get_running_loop()
    async with (
        await loop.create_server(lambda: Connection(engines.prefill), "127.0.0.1", 0) as prefill,
        await loop.create_server(lambda: Connection(engines.decode), "127.0.0.1", 0) as decode,
    ):
        ports = [server.sockets[0].getsockname()[1] for server in (prefill, decode)]
        sample = await measure(
            lambda: BothLegs(*ports),
            Load(1, CHUNKS, 0.0, 100, 0.2, 0.0),
            None,
            os.getpid(),
            busy=lambda: 0.0,
            yardstick=yardstick,
            calm_ms=calm_ms,
        )
    assert looked == slices + 1
    assert sample.undisturbed == (0 if slowly == 99 and calm_ms == 1.3 else 1)


def test_the_yardstick_is_of_its_core_and_ends_with_who_looks() -> None:
    core = max(os.sched_getaffinity(0))
    with closing(yardstick.Yardstick(core)) as looking:
        pid = looking._process.pid
        end = time.monotonic() + 20
        while (took := looking.take()) is None and time.monotonic() < end:
            time.sleep(0.05)
        assert took is not None and 0 < took < 1000
        assert os.sched_getaffinity(pid) == {core}
        assert looking.take() is None, "that was all until now"
    assert not Path(f"/proc/{pid}").exists()


def test_help_has_an_example_and_unknown_arms_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for given, status, text in (
        (["--help"], 0, "example:\n  python -m tools.bench.router run"),
        (["run", "--help"], 0, "example:"),
        (["run", "--arms", "theirs"], 2, "no such arm: theirs; there are direct, ours"),
        (["run", "--chunks", "1"], 2, "--chunks must be at least 2"),
        (["run", "--redis", "redis://:s3cret@h/0"], 2, "would show the URL's password"),
    ):
        with pytest.raises(SystemExit) as ended:
            parse(given)
        assert ended.value.code == status
        captured = capsys.readouterr()
        assert text in captured.out + captured.err
        assert "s3cret" not in captured.out + captured.err


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
async def test_a_run_measures_our_router_and_its_memory(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    """Also with its state in a Redis, whose arm comes last."""
    out = tmp_path / "router.json"
    redis = await RedisServer(unused_tcp_port).start()
    command = [sys.executable, "-m", "tools.bench.router", "run", "--arms", "direct,ours"]
    command += ["--repeats", "1", "--concurrency", "2", "--chunks", "3", "--interval", "5"]
    command += ["--seconds", "1", "--warm", "1", "--saturated", "1"]
    command += ["--conversations", "20", "--redis", redis.url, "--json", str(out)]
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "overlay")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    kept = await redis.keys()
    await redis.kill()
    assert done.returncode == 1 and "NOT MET" in done.stdout, done.stdout + done.stderr
    data = json.loads(out.read_text(encoding="utf-8"))
    assert list(data["samples"]) == ["steps", "paced", "saturated"]
    (ours,) = data["samples"]["paced"]["ours"]
    assert ours["streams"] > 0 and ours["first_p50_ms"] > 0
    assert list(data["samples"]["paced"]) == ["direct", "ours", "ours, Redis"] and kept
    assert data["samples"]["paced"]["ours, Redis"][0]["streams"] > 0
    assert data["memory"]["conversations"] == 20 and data["memory"]["after_mb"] > 10
    again = subprocess.run(
        [*command[:3], "report", str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert again.returncode == 1 and again.stdout == done.stdout
