"""The proof that KV was moved."""

from __future__ import annotations

import pytest

from tests.unit.bench.fake import BLOCK, BYTES_PER_TOKEN
from tests.unit.bench.made import about, computed, read, run
from tools.bench.collect import Joined, Run
from tools.bench.prove import prove
from tools.bench.servers import READ_BYTES


def test_whole_blocks_for_what_was_read_are_a_proof() -> None:
    for tokens in (1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7):
        proof = prove(run("on", read(tokens)))
        assert proof.holds, proof.problems
        assert (proof.reads, proof.tokens_read) == (1, tokens)


@pytest.mark.parametrize("tokens", [128, 640, 4000])
@pytest.mark.parametrize("blocks_off", [-2, 2])
def test_a_difference_of_more_than_a_block_is_none(tokens: int, blocks_off: int) -> None:
    moved = (tokens + blocks_off * BLOCK) * BYTES_PER_TOKEN
    proof = prove(run("on", read(tokens, moved=moved)))
    assert len(proof.problems) == 1
    assert f"{moved} bytes moved for {tokens} tokens" in proof.problems[0]
    assert f"expected {tokens * BYTES_PER_TOKEN} within one block" in proof.problems[0]


def test_each_request_is_checked_for_itself() -> None:
    """Too much in one and too little in another do not make up for each other."""
    more, less = 1000 + 2 * BLOCK, 1000 - 2 * BLOCK
    proof = prove(run("on", *(read(1000, moved=n * BYTES_PER_TOKEN) for n in (more, less))))
    assert len(proof.problems) == 2


def test_bytes_without_tokens_are_noticed_in_any_arm() -> None:
    one = computed()
    moved = Joined(**{**vars(one), "bytes_moved": 3 * BLOCK * BYTES_PER_TOKEN})
    assert not prove(run("off", moved)).holds


def test_nothing_moved_fails_the_on_arm_alone() -> None:
    assert prove(run("off", computed())).holds
    assert prove(run("on-cached", computed(arm="on-cached"))).holds
    proof = prove(run("on", computed(arm="on")))
    assert proof.problems == ("nothing moved: no request read any token back",)


def test_a_request_that_cannot_be_joined_is_not_proven() -> None:
    lost = Joined(computed(arm="on").record, missing=("line of the router",))
    proof = prove(run("on", read(640), lost))
    assert proof.problems == ("1 of 2 requests could not be joined with the logs",)


def test_ps_log_must_agree_with_nixls_own_counter() -> None:
    moved = 5 * BLOCK * BYTES_PER_TOKEN

    def with_counter(counted: float | None) -> Run:
        totals = None if counted is None else {READ_BYTES: counted}
        session = {**about("on")["sessions"][0], "totals": totals}
        return Run(about("on", sessions=[session]), (read(640),), logged_bytes=moved)

    assert prove(with_counter(moved)).holds
    assert prove(with_counter(None)).holds  # interrupted: P's counter was never read
    assert "counted 0" in prove(with_counter(0)).problems[0]
