"""Whatever a client does to its history, the answer is the one that a plain recompute gives.

Greedy, float32. The oracle is the same engine without transfer: in `pair` no prefix caches exist,
and in `cached_pair` a salt of its own keeps the oracle's request away from them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Route
from tests.e2e.oracle import CHAT, IDS, TEXT, Compared, ask, compare
from tests.e2e.turns import MODEL, http, metric, outcomes
from tools.cluster import Cluster, ClusterOptions, RoleOptions, cluster
from tools.cluster.tokenizer import GENERATED_IDS

# Turn 2 out of turn 1: its prompt h (700 tokens), D's answer out (40), new(n) random tokens; and
# how many tokens may be read at least and at most. Blocks have 128 tokens.
Row = Callable[[list[int], list[int], Callable[[int], list[int]]], list[int]]
CASES: dict[str, tuple[Row, int, int]] = {
    "append": (lambda h, out, new: h + out + new(100), 739, 739),
    "edited_front": (lambda h, out, new: new(400) + h[400:] + out + new(100), 0, 0),
    "edited_middle": (lambda h, out, new: h[:400] + new(50) + h[450:] + out + new(100), 384, 400),
    "truncated": (lambda h, out, new: h[:300] + new(20), 256, 300),
    "reasoning_stripped": (lambda h, out, new: h + out[20:] + new(100), 640, 700),
    "other_conversation": (lambda h, out, new: new(900), 0, 0),
    "regenerated": (lambda h, out, new: h, 640, 699),
    "retokenised_tail": (lambda h, out, new: h + out[:-3] + new(62), 640, 739),
    "compacted": (lambda h, out, new: h[:256] + new(90) + out, 256, 256),
    "duplicated": (lambda h, out, new: h + h + out, 640, 700),
    "swapped": (lambda h, out, new: h[350:] + h[:350] + out, 0, 0),
}
# Conversations per kind of request and cluster; make test-full asks for more.
CONVERSATIONS = int(os.environ.get("BIDIR_MUTATED", "7"))


def mutate_list(rng: random.Random, items: list[Any], new: Callable[[int], list[Any]]) -> list[Any]:
    """One thing that clients do to histories, on tokens, characters or messages."""
    at, span = rng.randrange(len(items) + 1), rng.randrange(1, max(2, len(items) // 3))
    kind = rng.choice(("append", "edit", "delete", "truncate", "duplicate", "same"))
    if kind == "append":
        return items + new(span)
    if kind == "edit":
        return items[:at] + new(span) + items[at + span :]
    if kind == "delete":
        return items[:at] + items[at + span :]
    if kind == "truncate":
        return items[: max(at, 1)]
    if kind == "duplicate":
        return items[:at] + items[max(0, at - span) : at] + items[at:]
    return list(items)


def characters(rng: random.Random, count: int) -> list[str]:
    return [chr(rng.choice(GENERATED_IDS)) for _ in range(count)]


def messages(rng: random.Random, count: int) -> list[dict[str, str]]:
    return [
        {"role": rng.choice(("user", "assistant")), "content": "".join(characters(rng, 60))}
        for _ in range(count)
    ]


def ids_conversation(rng: random.Random) -> tuple[Any, Callable[[dict[str, Any]], Any]]:
    history = rng.choices(GENERATED_IDS, k=rng.choice((150, 300, 520)))

    def second(answer: dict[str, Any]) -> Any:
        told = history + IDS.pieces(answer)
        return mutate_list(rng, told, lambda n: rng.choices(GENERATED_IDS, k=n)) or [65]

    return history, second


def text_conversation(rng: random.Random) -> tuple[Any, Callable[[dict[str, Any]], Any]]:
    history = characters(rng, rng.choice((150, 300, 520)))

    def second(answer: dict[str, Any]) -> Any:
        told = history + TEXT.pieces(answer)
        return "".join(mutate_list(rng, told, lambda n: characters(rng, n))) or "A"

    return "".join(history), second


def chat_conversation(rng: random.Random) -> tuple[Any, Callable[[dict[str, Any]], Any]]:
    history = messages(rng, rng.choice((2, 4, 6)))

    def second(answer: dict[str, Any]) -> Any:
        reply = "".join(CHAT.pieces(answer))
        # Reasoning stripped: part of the reply never comes back.
        kept = reply[rng.choice((0, 0, 8)) :]
        told = [*history, {"role": "assistant", "content": kept}, *messages(rng, 1)]
        return mutate_list(rng, told, lambda n: messages(rng, min(n, 2))) or messages(rng, 1)

    return history, second


MAKERS = {"ids": (IDS, ids_conversation), "text": (TEXT, text_conversation)}
MAKERS["chat"] = (CHAT, chat_conversation)


@pytest.fixture(scope="module")
def cached_pair(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, report: Callable[[str], None]
) -> Iterator[Cluster]:
    """P and D with prefix caches, which a wrong block would poison for later requests."""
    options = ClusterOptions(
        model=model_folder,
        forked=True,
        prefill=RoleOptions(prefix_caching=True),
        kv_connector_extra_config={"decoder_kv_blocks_ttl": 60},
        env={"TORCHDYNAMO_DISABLE": "1"},
    )
    folder = tmp_path_factory.mktemp("cached-logs")
    with cluster(options=options, log_folder=folder, report=report) as running:
        yield running


def run_mutated(kind: str, pair: Cluster, route: Route, compared: Compared, salted: bool) -> None:
    api, make = MAKERS[kind]
    rng = random.Random(f"{kind}-{salted}")
    prefill, decode = pair.prefill[0], pair.decode[0]
    with route(pair) as router:
        for number in range(CONVERSATIONS):
            history, second = make(rng)
            first = ask(router, api, history, conversation_id=f"c{number}")
            changed = second(first)
            answer = ask(router, api, changed, conversation_id=f"c{number}")
            compare(api, decode, changed, answer, salted, compared)
            # Nothing wrong was filed: plain requests on both are still right.
            if salted:
                for engine in (prefill, decode):
                    compare(api, engine, changed, ask(engine, api, changed), salted, compared)
        assert outcomes(router)["hit"] == CONVERSATIONS


@pytest.mark.parametrize("kind", MAKERS)
def test_mutated_conversations_with_prefix_caches(
    kind: str, cached_pair: Cluster, route: Route, compared: Compared
) -> None:
    run_mutated(kind, cached_pair, route, compared, salted=True)


@pytest.mark.parametrize("kind", MAKERS)
def test_mutated_conversations_without_prefix_caches(
    kind: str, pair: Cluster, route: Route, compared: Compared
) -> None:
    run_mutated(kind, pair, route, compared, salted=False)


@pytest.mark.parametrize("name", CASES)
def test_the_histories_that_the_base_release_answers_wrong(
    name: str, pair: Cluster, route: Route, compared: Compared
) -> None:
    second, least, most = CASES[name]
    rng = random.Random(name)
    h = rng.choices(GENERATED_IDS, k=700)
    prefill = pair.prefill[0]
    with route(pair) as router:
        first = ask(router, IDS, h, conversation_id="c", max_tokens=40)
        prompt = second(h, IDS.pieces(first), lambda n: rng.choices(GENERATED_IDS, k=n))
        before = metric(prefill, "vllm:bidir_tokens_total", kind="read")
        answer = ask(router, IDS, prompt, conversation_id="c")
        compare(IDS, pair.decode[0], prompt, answer, False, compared)
        read = metric(prefill, "vllm:bidir_tokens_total", kind="read") - before
    assert least <= read <= most


def test_another_salt_reads_nothing(pair: Cluster, route: Route) -> None:
    """KV saved under one salt is never loaded into a request with another."""
    rng = random.Random(22)
    h = rng.choices(GENERATED_IDS, k=400)
    prefill = pair.prefill[0]
    with route(pair) as router:
        for salt, reads in (("a", 0), ("b", 0), ("b", 1)):
            before = metric(prefill, "vllm:bidir_read_back_total", outcome="read")
            answer = ask(router, IDS, h, conversation_id="c", cache_salt=salt)
            h = h + IDS.pieces(answer)
            after = metric(prefill, "vllm:bidir_read_back_total", outcome="read")
            assert after - before == reads


def parent_turn(pair: Cluster, history: list[int], **extra: Any) -> tuple[list[int], Any]:
    """A finished turn: all its tokens, and D's params."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    handover = ask(pair.prefill[0], IDS, history, max_tokens=1, kv_transfer_params=params)
    given = handover["kv_transfer_params"]
    answer = ask(pair.decode[0], IDS, history, kv_transfer_params=given, **extra)
    return history + IDS.pieces(answer), answer["kv_transfer_params"]


def next_turn(pair: Cluster, prompt: list[int], params: Any, compared: Compared) -> None:
    """The turn after it, with what the router would attach; its answer must be right."""
    handed = ask(pair.prefill[0], IDS, prompt, max_tokens=1, kv_transfer_params=params)
    given = handed["kv_transfer_params"]
    answer = ask(pair.decode[0], IDS, prompt, kv_transfer_params=given)
    compare(IDS, pair.decode[0], prompt, answer, False, compared)


def reads(pair: Cluster) -> float:
    return metric(pair.prefill[0], "vllm:bidir_read_back_total", outcome="read")


def test_siblings_of_one_state_all_read_it(pair: Cluster, compared: Compared) -> None:
    """Forks: the same parent state is read more than once, and stays right."""
    rng = random.Random(5)
    told, params = parent_turn(pair, rng.choices(GENERATED_IDS, k=400))
    before = reads(pair)
    for number in range(3):
        next_turn(pair, told + rng.choices(GENERATED_IDS, k=20 + number), params, compared)
    assert reads(pair) - before == 3


def test_a_turn_of_one_token_is_read_back(pair: Cluster, compared: Compared) -> None:
    """max_tokens=1 on D: its only token was sampled, never fed, and has no KV."""
    history = random.Random(23).choices(GENERATED_IDS, k=300)
    told, params = parent_turn(pair, history, max_tokens=1)
    assert params["remote_num_tokens"] == 300
    before = metric(pair.prefill[0], "vllm:bidir_tokens_total", kind="read")
    next_turn(pair, [*told, 65, 66], params, compared)
    assert metric(pair.prefill[0], "vllm:bidir_tokens_total", kind="read") - before == 300


TAMPERED: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "longer count": lambda own, other: {"remote_num_tokens": 10**6},
    "other block ids": lambda own, other: {"remote_block_ids": [list(range(500))]},
    "unknown lease": lambda own, other: {"lease_id": "d0-" + "0" * 32},
    "another's lease": lambda own, other: {"lease_id": other["lease_id"]},
    "another's proof": lambda own, other: {"prefix_proof": other["prefix_proof"]},
    "another's turn": lambda own, other: other,
    "garbage proof": lambda own, other: {"prefix_proof": {"v": 1, "garbage": "A" * 100_000}},
    "garbage base64": lambda own, other: {
        "prefix_proof": {**own["prefix_proof"], "checkpoints": [[0, "*" * 22], [1, "A"]]}
    },
    "10 MB of it": lambda own, other: {
        "prefix_proof": {**own["prefix_proof"], "checkpoints": [[0, "A" * 10_000_000]]}
    },
    "no proof": lambda own, other: {"prefix_proof": None},
    "wrong tp_size": lambda own, other: {"tp_size": 8},
    "other engine id": lambda own, other: {"remote_engine_id": "another"},
    "other port": lambda own, other: {"remote_port": 1},
}


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_params_cost_a_recompute_and_no_engine(
    name: str, pair: Cluster, compared: Compared
) -> None:
    rng = random.Random(name)
    told, params = parent_turn(pair, rng.choices(GENERATED_IDS, k=300))
    _, other = parent_turn(pair, rng.choices(GENERATED_IDS, k=300))
    before = reads(pair)
    forged = {**params, **TAMPERED[name](params, other)}
    next_turn(pair, [*told, 65, 66], forged, compared)
    # What only names blocks or counts that nobody believes takes nothing away.
    harmless = name in ("longer count", "other block ids", "wrong tp_size")
    assert reads(pair) - before == harmless
    # The engine is as it was: the genuine state is still read.
    next_turn(pair, [*told, 65, 66, 67], params, compared)
    assert reads(pair) - before == harmless + 1


def test_both_flags_at_once_read_nothing_past_verification(
    pair: Cluster, compared: Compared
) -> None:
    """`do_remote_prefill` beside `do_remote_decode` would have the base read what params name."""
    rng = random.Random(24)
    told, params = parent_turn(pair, rng.choices(GENERATED_IDS, k=300))
    _, other = parent_turn(pair, rng.choices(GENERATED_IDS, k=300))
    forged = {**params, "do_remote_prefill": True, "remote_block_ids": other["remote_block_ids"]}
    next_turn(pair, [*told, 65, 66], forged, compared)


@pytest.mark.parametrize("host", ["192.0.2.1", "peer.invalid", "127.0.0.2"])
def test_a_host_outside_kv_peers_is_a_bad_request(host: str, pair: Cluster) -> None:
    history = random.Random(host).choices(GENERATED_IDS, k=300)
    told, params = parent_turn(pair, history)
    body = {"model": MODEL, "prompt": told, "max_tokens": 1}
    for engine in pair.engines:
        with http() as client:
            answer = client.post(
                f"{engine.url}/v1/completions",
                json={**body, "kv_transfer_params": {**params, "remote_host": host}},
            )
        assert answer.status_code == 400, answer.text
        assert host in answer.json()["error"]["message"]
        assert "kv_peers" in answer.json()["error"]["message"]
