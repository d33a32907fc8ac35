"""Whatever a client does to its history, the answer is the one that a plain recompute gives.

Greedy, float32. The oracle is the same engine without transfer: in `pair` no prefix caches exist,
and in `cached_pair` a salt of its own keeps the oracle's request away from them.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Route
from tests.e2e.turns import MODEL, http, metric, outcomes
from tools.cluster import Cluster, ClusterOptions, Engine, RoleOptions, cluster
from tools.cluster.router import RouterProcess
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
MAX_TOKENS = 16
TIE = 1e-4
# 1 excused place in so many compared tokens.
TOKENS_PER_EXCUSE = 2000


@dataclass
class Compared:
    """What has been compared in a test, and the near-ties that excused a difference."""

    tokens: int = 0
    excused: list[str] = field(default_factory=list)

    def check(self) -> None:
        print("\n".join(self.excused))
        assert len(self.excused) <= max(1, self.tokens // TOKENS_PER_EXCUSE), self.excused


@dataclass(frozen=True)
class Kind:
    """One API: how a history becomes a body, and an answer a list of pieces to compare."""

    name: str
    path: str
    body: Callable[[Any], dict[str, Any]]
    pieces: Callable[[dict[str, Any]], list[Any]]
    logprobs: dict[str, Any]
    gap: Callable[[dict[str, Any], int], float]


def completion_gap(answer: dict[str, Any], at: int) -> float:
    best = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][at].values())[-2:]
    return float(best[1] - best[0])


def chat_gap(answer: dict[str, Any], at: int) -> float:
    tops = answer["choices"][0]["logprobs"]["content"][at]["top_logprobs"]
    return float(tops[0]["logprob"] - tops[1]["logprob"])


IDS = Kind(
    "ids",
    "/v1/completions",
    lambda prompt: {"prompt": prompt, "return_token_ids": True},
    lambda answer: list(answer["choices"][0]["token_ids"]),
    {"logprobs": 2},
    completion_gap,
)
TEXT = Kind(
    "text",
    "/v1/completions",
    lambda prompt: {"prompt": prompt},
    lambda answer: list(answer["choices"][0]["text"]),
    {"logprobs": 2},
    completion_gap,
)
CHAT = Kind(
    "chat",
    "/v1/chat/completions",
    lambda messages: {"messages": messages},
    lambda answer: list(answer["choices"][0]["message"]["content"]),
    {"logprobs": True, "top_logprobs": 2},
    chat_gap,
)


def ask(server: Engine | RouterProcess, kind: Kind, history: Any, **extra: Any) -> dict[str, Any]:
    body = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS, **kind.body(history)}
    with http() as client:
        response = client.post(server.url + kind.path, json={**body, **extra})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def compare(
    kind: Kind, engine: Engine, history: Any, answer: dict[str, Any], salted: bool, seen: Compared
) -> None:
    """The answer equals the recompute's; a near-tie of the recompute may excuse a difference."""
    salt = {"cache_salt": uuid.uuid4().hex} if salted else {}
    oracle = ask(engine, kind, history, **salt)
    found, wanted = kind.pieces(answer), kind.pieces(oracle)
    seen.tokens += len(wanted)
    if found == wanted:
        return
    pairs = zip(found, wanted, strict=False)
    at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(found), len(wanted)))
    detailed = ask(engine, kind, history, **kind.logprobs, **salt)
    gap = kind.gap(detailed, at)
    assert gap <= TIE, f"{kind.name}: differs at token {at}, gap {gap:.2g}: {found} / {wanted}"
    seen.excused.append(f"near-tie: {kind.name}, token {at}, gap {gap:.2g}")


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
        prefill=RoleOptions(prefix_caching=True),
        kv_connector_extra_config={"decoder_kv_blocks_ttl": 60},
        env={"TORCHDYNAMO_DISABLE": "1"},
    )
    folder = tmp_path_factory.mktemp("cached-logs")
    with cluster(options=options, log_folder=folder, report=report) as running:
        yield running


def run_mutated(kind: str, pair: Cluster, route: Route, salted: bool) -> None:
    api, make = MAKERS[kind]
    rng = random.Random(f"{kind}-{salted}")
    seen = Compared()
    prefill, decode = pair.prefill[0], pair.decode[0]
    with route(pair) as router:
        for number in range(CONVERSATIONS):
            history, second = make(rng)
            first = ask(router, api, history, conversation_id=f"c{number}")
            changed = second(first)
            answer = ask(router, api, changed, conversation_id=f"c{number}")
            compare(api, decode, changed, answer, salted, seen)
            # Nothing wrong was filed: plain requests on both are still right.
            if salted:
                for engine in (prefill, decode):
                    compare(api, engine, changed, ask(engine, api, changed), salted, seen)
        assert outcomes(router)["hit"] == CONVERSATIONS
    seen.check()


@pytest.mark.parametrize("kind", MAKERS)
def test_mutated_conversations_with_prefix_caches(
    kind: str, cached_pair: Cluster, route: Route
) -> None:
    run_mutated(kind, cached_pair, route, salted=True)


@pytest.mark.parametrize("kind", MAKERS)
def test_mutated_conversations_without_prefix_caches(
    kind: str, pair: Cluster, route: Route
) -> None:
    run_mutated(kind, pair, route, salted=False)


@pytest.mark.parametrize("name", CASES)
def test_the_histories_that_the_base_release_answers_wrong(
    name: str, pair: Cluster, route: Route
) -> None:
    second, least, most = CASES[name]
    rng = random.Random(name)
    h = rng.choices(GENERATED_IDS, k=700)
    prefill = pair.prefill[0]
    seen = Compared()
    with route(pair) as router:
        first = ask(router, IDS, h, conversation_id="c", max_tokens=40)
        prompt = second(h, IDS.pieces(first), lambda n: rng.choices(GENERATED_IDS, k=n))
        before = metric(prefill, "vllm:bidir_tokens_total", kind="read")
        answer = ask(router, IDS, prompt, conversation_id="c")
        compare(IDS, pair.decode[0], prompt, answer, False, seen)
        read = metric(prefill, "vllm:bidir_tokens_total", kind="read") - before
    assert least <= read <= most
    seen.check()


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


def test_siblings_of_one_state_all_read_it(pair: Cluster, route: Route) -> None:
    """Forks: the same parent state is read more than once, and stays right."""
    rng = random.Random(5)
    h = rng.choices(GENERATED_IDS, k=400)
    seen = Compared()
    prefill, decode = pair.prefill[0], pair.decode[0]
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    handover = ask(prefill, IDS, h, max_tokens=1, kv_transfer_params=params)
    parent = ask(decode, IDS, h, kv_transfer_params=handover["kv_transfer_params"])
    before = metric(prefill, "vllm:bidir_read_back_total", outcome="read")
    for number in range(3):
        prompt = h + IDS.pieces(parent) + rng.choices(GENERATED_IDS, k=20 + number)
        again = parent["kv_transfer_params"]
        handed = ask(prefill, IDS, prompt, max_tokens=1, kv_transfer_params=again)
        answer = ask(decode, IDS, prompt, kv_transfer_params=handed["kv_transfer_params"])
        compare(IDS, decode, prompt, answer, False, seen)
    after = metric(prefill, "vllm:bidir_read_back_total", outcome="read")
    assert after - before == 3
    seen.check()


TAMPERED: list[dict[str, Any]] = [
    {"remote_num_tokens": 10**6},
    {"remote_block_ids": [list(range(500))]},
    {"lease_id": "d0-" + "0" * 32},
    {"prefix_proof": {"v": 1, "garbage": "A" * 100_000}},
    {"prefix_proof": None},
    {"tp_size": 8},
    {"remote_engine_id": "another"},
    {"remote_port": 1},
]


def test_tampered_params_cost_a_recompute_and_no_engine(pair: Cluster) -> None:
    rng = random.Random(6)
    h = rng.choices(GENERATED_IDS, k=300)
    seen = Compared()
    prefill, decode = pair.prefill[0], pair.decode[0]
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    handover = ask(prefill, IDS, h, max_tokens=1, kv_transfer_params=params)
    parent = ask(decode, IDS, h, kv_transfer_params=handover["kv_transfer_params"])
    prompt = h + IDS.pieces(parent) + [65, 66]
    for change in TAMPERED:
        forged = {**parent["kv_transfer_params"], **change}
        handed = ask(prefill, IDS, prompt, max_tokens=1, kv_transfer_params=forged)
        answer = ask(decode, IDS, prompt, kv_transfer_params=handed["kv_transfer_params"])
        compare(IDS, decode, prompt, answer, False, seen)
    assert all(engine.is_alive() and engine.is_ready() for engine in pair.engines)
    seen.check()
