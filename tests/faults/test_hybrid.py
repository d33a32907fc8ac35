"""A model with two kinds of KV cache groups: handovers only, and none that answers wrong.

Real engines. Read-back is off for such models. The base takes a handover that has failed for done,
and answers from memory that nobody has written, with 200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.oracle import Compared
from tests.faults.conftest import BLOCKS, TTL_S
from tests.faults.handovers import BLOCK, FORGED, comes_too_late, fails, lost, names_anothers
from tests.faults.turns import FIRST_TURN, check_right, clear_cache, decode, prefill, rests, tokens
from tools.cluster import Cluster, ClusterOptions, cluster
from tools.cluster.model import ModelShape, make_model

# Tokens that every other layer attends to: two blocks of an engine on CPUs.
WINDOW = 256


@pytest.fixture(scope="module")
def hybrid(
    tmp_path_factory: pytest.TempPathFactory, report: Callable[[str], None]
) -> Iterator[Cluster]:
    options = ClusterOptions(
        model=make_model(tmp_path_factory.mktemp("hybrid"), ModelShape(window=WINDOW)),
        max_model_len=2048,
        forked=True,
        kv_connector_extra_config={"kv_lease_duration": TTL_S},
        args=("--num-gpu-blocks-override", str(BLOCKS)),
        env={"TORCHDYNAMO_DISABLE": "1", "VLLM_SERVER_DEV_MODE": "1"},
    )
    folder = tmp_path_factory.mktemp("hybrid-logs")
    with cluster(options=options, log_folder=folder, report=report) as running:
        yield running


@pytest.mark.parametrize("length", [200, 1500], ids=["within the window", "beyond it"])
def test_a_handover_is_right(hybrid: Cluster, compared: Compared, length: int) -> None:
    p, d = hybrid.prefill[0], hybrid.decode[0]
    prompt = tokens(length, length)
    handed = prefill(p, prompt, FIRST_TURN)
    assert len(handed["remote_block_ids"]) == 2, "the model has one kind of groups"
    said, _ = decode(d, prompt, handed)
    rests(p)
    clear_cache(d)
    check_right(d, prompt + said[:1], compared)


def test_a_prompt_whose_last_token_attends_to_what_is_not_loaded_is_computed(
    hybrid: Cluster, compared: Compared
) -> None:
    """Its window begins with the last token of a block; the base loads from the next block on."""
    p, d = hybrid.prefill[0], hybrid.decode[0]
    prompt = tokens("edge", WINDOW + BLOCK - 1)
    handed = prefill(p, prompt, FIRST_TURN)
    before = lost(d, "window")
    said, _ = decode(d, prompt, handed)
    assert lost(d, "window") == before + 1
    rests(p)
    check_right(d, prompt + said[:1], compared)


def test_a_d_that_comes_too_late_does_not_use_what_it_finds(
    hybrid: Cluster, compared: Compared
) -> None:
    comes_too_late(hybrid, compared)


@pytest.mark.parametrize("forged", FORGED)
def test_nobody_is_answered_from_anothers_prompt(
    hybrid: Cluster, compared: Compared, forged: str
) -> None:
    names_anothers(hybrid, compared, forged)


@pytest.mark.parametrize(
    "change",
    [
        lambda near, far: [far],
        lambda near, far: [near, far[1:]],
        lambda near, far: [near, [9999] * len(far)],
    ],
    ids=["one group", "too few blocks", "no such block"],
)
def test_params_that_do_not_fit_are_an_error(
    hybrid: Cluster, compared: Compared, change: Callable[[list[int], list[int]], list[list[int]]]
) -> None:
    """The base's assertions would end the engine."""
    p, d = hybrid.prefill[0], hybrid.decode[0]
    prompt = tokens(("unfit", str(change)), 600)
    handed = prefill(p, prompt, FIRST_TURN)
    groups = change(*handed["remote_block_ids"])
    fails(d, prompt, {**handed, "remote_block_ids": groups}, compared)


def test_a_handover_of_a_p_that_is_gone_is_an_error(hybrid: Cluster, compared: Compared) -> None:
    """The last one: P stays dead."""
    p, d = hybrid.prefill[0], hybrid.decode[0]
    prompt = tokens("gone", 900)
    handed = prefill(p, prompt, FIRST_TURN)
    p.kill()
    fails(d, prompt, handed, compared)
