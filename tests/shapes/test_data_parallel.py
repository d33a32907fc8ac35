"""One P, and a D of two data-parallel ranks behind one server: each rank keeps turns of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import compared, model_folder, report
from tests.e2e.oracle import IDS, Compared, compare
from tests.e2e.turns import MODEL, http, metric, outcomes, tokens, wait_until
from tests.shapes.load import begin, go_on, say, used
from tools.cluster import Cluster, ClusterOptions, Engine, RoleOptions, cluster
from tools.cluster.router import router

__all__ = ["compared", "model_folder", "report"]

RANKS = 2
LEASE_S = 6.0
FIRST = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def ranked(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, report: Callable[[str], None]
) -> Iterator[Cluster]:
    options = ClusterOptions(
        model=model_folder,
        max_model_len=2048,
        patient=True,
        forked=True,
        kv_connector_extra_config={"kv_recompute_threshold": 0, "kv_lease_duration": 4},
        prefill=RoleOptions(prefix_caching=False),
        decode=RoleOptions(
            data_parallel=RANKS,
            kv_connector_extra_config={"decoder_kv_lease_duration": LEASE_S},
            # By default there are as many servers as ranks.
            args=("--api-server-count", "1"),
        ),
        env={"TORCHDYNAMO_DISABLE": "1"},
    )
    folder = tmp_path_factory.mktemp("data-parallel")
    with cluster(options=options, log_folder=folder, report=report) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(ranked: Cluster) -> Iterator[None]:
    """Every rank gets back what it has kept."""
    yield
    p, d = ranked.prefill[0], ranked.decode[0]
    wait_until(lambda: leases(d)["leases"] == 0, 2 * LEASE_S, "leases are left")
    assert [used(d, rank) for rank in range(RANKS)] == [0, 0]
    wait_until(lambda: used(p) == 0, 10, "P holds blocks")


def post(engine: Engine, path: str, body: dict[str, Any], **headers: str) -> Any:
    with http() as client:
        answer = client.post(engine.url + path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def leases(d: Engine) -> Any:
    with http() as client:
        answer = client.get(f"{d.url}/v1/kv_leases")
    assert answer.status_code == 200, answer.text
    return answer.json()


def leg(engine: Engine, prompt: list[int], params: Any, most: int, **headers: str) -> Any:
    body = {"model": MODEL, "temperature": 0, "max_tokens": most, "ignore_eos": True}
    body |= {"kv_transfer_params": params, **IDS.body(prompt)}
    return post(engine, "/v1/completions", body, **headers)


def turn(pair: Cluster, rank: int, prompt: list[int], kept: Any = None) -> tuple[list[int], Any]:
    """Both legs, the second on this rank: what it said, and its params."""
    read_back = FIRST if kept is None else {**kept, **FIRST}
    handed = leg(pair.prefill[0], prompt, read_back, 1)["kv_transfer_params"]
    headers = {"X-data-parallel-rank": str(rank)}
    answer = leg(pair.decode[0], prompt, handed, 16, **headers)
    return IDS.pieces(answer), answer["kv_transfer_params"]


def reads(pair: Cluster) -> float:
    return metric(pair.prefill[0], "vllm:bidir_read_back_total", outcome="read")


def release(d: Engine, ids: list[str]) -> Any:
    return post(d, "/v1/kv_leases/release", {"lease_ids": ids})


def test_p_reads_back_from_the_rank_that_keeps_the_turn(
    ranked: Cluster, compared: Compared
) -> None:
    """Wherever the turn before was: ranks are peers of their own, with ports of their own."""
    d = ranked.decode[0]
    for ranks in ((0, 0, 1, 0), (1, 0, 1, 1)):
        prompt, kept, ids = tokens(400, ranks[0]), None, []
        for number, rank in enumerate(ranks):
            before = reads(ranked)
            said, kept = turn(ranked, rank, prompt, kept)
            assert reads(ranked) - before == (number > 0)
            compare(
                IDS,
                ranked.prefill[0],
                prompt,
                {"choices": [{"token_ids": said}]},
                True,
                compared,
                ignore_eos=True,
            )
            assert re.fullmatch(rf"d{rank}-[0-9a-f]{{32}}", kept["lease_id"])
            assert kept["remote_engine_id"] == f"{d.engine_id}_dp{rank}"
            assert kept["remote_port"] == d.side_channel_port + rank
            ids.append(kept["lease_id"])
            prompt = prompt + said + tokens(30, 100 + number)
        # Nobody has renewed the others.
        assert ids[-1] in release(d, ids)["released"]


def test_leases_are_renewed_read_and_released_on_the_rank_that_their_ids_name(
    ranked: Cluster,
) -> None:
    d = ranked.decode[0]
    kept = [turn(ranked, rank, tokens(300, 10 + rank))[1] for rank in range(RANKS)]
    ids = [one["lease_id"] for one in kept]
    swapped = [f"d{1 - rank}{one[2:]}" for rank, one in enumerate(ids)]
    odd = ["d2" + ids[0][2:], "d0-0", "d00" + ids[0][2:], 7]
    totals = leases(d)
    assert totals["leases"] == RANKS
    assert [(one["rank"], one["leases"], one["blocks"]) for one in totals["ranks"]] == [
        (0, 1, 3),
        (1, 1, 3),
    ]
    assert [metric(d, "vllm:bidir_leases", engine=str(rank)) for rank in range(RANKS)] == [1, 1]
    renewed = post(d, "/v1/kv_leases/renew", {"lease_ids": [*ids, *swapped, *odd]})
    assert renewed["renewed"].keys() == set(ids)
    assert sorted(map(str, renewed["lost"])) == sorted(map(str, [*swapped, *odd]))
    assert leases(d)["renewals"] - totals["renewals"] == RANKS
    with http() as client:
        for lease_id, params in zip(ids, kept, strict=True):
            assert client.get(f"{d.url}/v1/kv_leases/{lease_id}").json() == params
        for lease_id in swapped:
            assert client.get(f"{d.url}/v1/kv_leases/{lease_id}").status_code == 404
    assert release(d, [ids[1], *swapped])["released"] == [ids[1]]
    assert [one["leases"] for one in leases(d)["ranks"]] == [1, 0]
    assert release(d, ids) == {"released": [ids[0]], "lost": [ids[1]]}


def test_a_rank_does_not_answer_for_another(ranked: Cluster, compared: Compared) -> None:
    """Params that send P to the wrong rank's side channel: it computes, and says why."""
    d, p = ranked.decode[0], ranked.prefill[0]
    prompt = tokens(400, 20)
    said, kept = turn(ranked, 1, prompt)
    longer = prompt + said + tokens(30, 21)
    before = metric(p, "vllm:bidir_read_back_total", reason="hold_lost")
    wrong = {**kept, "remote_port": d.side_channel_port}
    answer = leg(p, longer, {**wrong, **FIRST}, 16)
    compare(IDS, p, longer, answer, True, compared, ignore_eos=True)
    assert metric(p, "vllm:bidir_read_back_total", reason="hold_lost") - before == 1
    release(d, [kept["lease_id"]])


def test_conversations_through_the_router_are_read_back_from_any_rank(
    ranked: Cluster, tmp_path: Path, compared: Compared
) -> None:
    """The server spreads turns over its ranks, whichever keeps the turn before."""
    d = ranked.decode[0]
    before, renewals = reads(ranked), leases(d)["renewals"]
    with router(ranked.prefill, ranked.decode, tmp_path, report=lambda line: None) as running:

        def converse(number: int) -> list[str]:
            history = begin(IDS, 1000 * number)
            reuse = []
            for more in range(3):
                told = say(running, f"c{number}", IDS, history, stream=bool(number % 2))
                assert told.whole, told
                reuse.append(told.reuse)
                answer = {"choices": [{"token_ids": told.said}]}
                compare(IDS, ranked.prefill[0], history, answer, True, compared, ignore_eos=True)
                history = go_on(IDS, history, told.said, 1000 * number + more)
            return reuse

        with ThreadPoolExecutor(4) as pool:
            said = list(pool.map(converse, range(4)))
        assert said == [["miss; reason=first_turn", "hit", "hit"]] * 4
        assert reads(ranked) - before == 8
        assert outcomes(running) == {"first_turn": 4, "hit": 8}
        assert metric(running, "bidir_router_params_dropped_total") == 0
        wait_until(lambda: leases(d)["leases"] == 4, 5, "leases are missing")
        assert all(one["leases"] for one in leases(d)["ranks"])
        # The router keeps what either rank keeps, and gives all of it back when it ends.
        time.sleep(1.5 * LEASE_S)
        assert leases(d)["leases"] == 4 and leases(d)["renewals"] - renewals >= 8
    assert leases(d)["leases"] == 0
