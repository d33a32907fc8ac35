"""P and D of different tensor-parallel size: what D keeps is read back, and the answers are right.

One engine of two ranks and one of one, each of which serves as P and as D; greedy, float32, without
prefix caches, so that a plain request is an independent oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import WITHOUT_PREFIX_CACHE, compared, model_folder, report
from tests.e2e.oracle import IDS, MAX_TOKENS, Compared, ask, compare
from tests.e2e.turns import KvCounters, http, metric, outcomes, tokens, wait_until
from tools.cluster import Cluster, ClusterOptions, Engine, RoleOptions, cluster
from tools.cluster.model import ModelShape
from tools.cluster.router import router

__all__ = ["compared", "model_folder", "report"]

BLOCK = 128
BYTES_PER_BLOCK = BLOCK * ModelShape().kv_bytes_per_token
LEASE_S = 60.0


@pytest.fixture(scope="module")
def engines(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, report: Callable[[str], None]
) -> Iterator[Cluster]:
    """The prefill engine has two ranks, the decode engine one; but either does both."""
    options = ClusterOptions(
        model=model_folder,
        max_model_len=2048,
        forked=True,
        kv_connector_extra_config={
            "kv_recompute_threshold": 0,
            "decoder_kv_lease_duration": LEASE_S,
        },
        # Both ranks on the engine's one core: the last word of a command line counts.
        prefill=RoleOptions(prefix_caching=False, args=("--tensor-parallel-size", "2")),
        decode=WITHOUT_PREFIX_CACHE,
        env={"TORCHDYNAMO_DISABLE": "1"},
    )
    folder = tmp_path_factory.mktemp("tensor-parallel-logs")
    with cluster(options=options, log_folder=folder, report=report) as running:
        yield running


@pytest.fixture(params=["2 ranks read from 1", "1 rank reads from 2"])
def pair(engines: Cluster, request: pytest.FixtureRequest) -> tuple[Engine, Engine]:
    """P and D."""
    two, one = engines.prefill[0], engines.decode[0]
    return (two, one) if request.param.startswith("2") else (one, two)


def leases(engine: Engine) -> dict[str, int]:
    with http() as client:
        totals: dict[str, int] = client.get(f"{engine.url}/v1/kv_leases").json()
    return totals


def test_a_conversation_is_read_back_and_given_back(
    pair: tuple[Engine, Engine], engines: Cluster, tmp_path: Path, compared: Compared
) -> None:
    p, d = pair
    oracle = engines.decode[0]
    with router([p], [d], tmp_path) as server, http() as client:

        def turn(prompt: list[int], read: range) -> list[int]:
            """The history with its answer, which is right; so many tokens were read for it."""
            counted = KvCounters.of(p)
            answer = ask(server, IDS, prompt, conversation_id="c")
            counted = KvCounters.of(p).since(counted)
            assert counted.read in read
            assert counted.computed == len(prompt) - counted.read
            # All ranks together, whichever way the heads are cut.
            assert counted.moved == -(-counted.read // BLOCK) * BYTES_PER_BLOCK
            compare(IDS, oracle, prompt, answer, False, compared)
            return prompt + IDS.pieces(answer)

        def exactly(count: int) -> range:
            return range(count, count + 1)

        history = turn(tokens(500, 1), exactly(0))
        # With what D has generated, but for the last token, which it has never been fed.
        history = turn(history + tokens(40, 2), exactly(500 + MAX_TOKENS - 1))
        edited = history[:300] + tokens(50, 3) + history[350:]
        history = turn(edited, range(2 * BLOCK, 301))
        history = turn(history + tokens(130, 4), exactly(len(edited) + MAX_TOKENS - 1))
        assert outcomes(server) == {"first_turn": 1, "hit": 3}

        # Only the last turn is kept, until nobody wants it any more.
        wait_until(lambda: leases(d)["leases"] == 1, 5, "the turns before are not given back")
        assert leases(d)["blocks"] == -(-(len(history) - 1) // BLOCK)
        assert client.delete(f"{server.url}/conversations/c").status_code == 204
        wait_until(lambda: leases(d)["leases"] == 0, 5, "D keeps what was deleted")
    after = leases(d)
    assert (after["blocks"], after["holds"]) == (0, 0)
    assert after["expired"] == after["reclaimed"] == 0
    # A step shows the blocks that are in use: none is left on either side.
    for engine in pair:
        ask(engine, IDS, tokens(10, 5), max_tokens=1)
        assert metric(engine, "vllm:kv_cache_usage_perc") == 0.0


def test_a_turn_that_is_gone_is_computed(
    pair: tuple[Engine, Engine], engines: Cluster, compared: Compared
) -> None:
    """D says so to every rank of P; what the one has not got, none has."""
    p, d = pair
    history = tokens(400, 6)
    first = {"do_remote_decode": True, "do_remote_prefill": False}
    handed = ask(p, IDS, history, max_tokens=1, kv_transfer_params=first)
    answer = ask(d, IDS, history, kv_transfer_params=handed["kv_transfer_params"])
    params = answer["kv_transfer_params"]
    with http() as client:
        released = client.post(
            f"{d.url}/v1/kv_leases/release", json={"lease_ids": [params["lease_id"]]}
        )
    assert released.status_code == 200
    lost = {"outcome": "recompute", "reason": "hold_lost"}
    before = metric(p, "vllm:bidir_read_back_total", **lost)
    prompt = history + IDS.pieces(answer) + tokens(20, 7)
    handed = ask(p, IDS, prompt, max_tokens=1, kv_transfer_params=params)
    answer = ask(d, IDS, prompt, kv_transfer_params=handed["kv_transfer_params"])
    assert metric(p, "vllm:bidir_read_back_total", **lost) - before == 1
    compare(IDS, engines.decode[0], prompt, answer, False, compared)
