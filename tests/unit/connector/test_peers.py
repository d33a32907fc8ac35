"""`kv_peers` names hosts by name, address or network; everything else is refused."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.bidir.connector.peers import check_host, check_peers, check_shape

HANDOVER = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 5600,
    "remote_block_ids": [[1]],
    "remote_blocks_expiry_time": 12.5,
}
PEERS = ["decode-0.example", "10.0.0.0/24", "192.0.2.7", "fd00::/8"]


@pytest.mark.parametrize(
    "host", ["decode-0.example", "DECODE-0.example", "10.0.0.9", "192.0.2.7", "fd00::1"]
)
def test_a_peer_passes(host: str) -> None:
    check_host(PEERS, host)


@pytest.mark.parametrize(
    "host",
    ["10.0.1.9", "192.0.2.8", "decode-1.example", "decode-0.example.evil", "", "::1", 7, ["x"]],
)
def test_any_other_host_is_refused(host: Any) -> None:
    with pytest.raises(ValueError, match="not one of this engine's kv_peers") as caught:
        check_host(PEERS, host)
    assert "10.0.0.0" not in str(caught.value), "the list is not the sender's business"


def test_without_the_option_or_a_host_nothing_is_refused() -> None:
    check_host(None, "anywhere")
    check_host(PEERS, None)


def test_an_empty_list_admits_nobody() -> None:
    with pytest.raises(ValueError, match="not one of"):
        check_host([], "10.0.0.1")


@pytest.mark.parametrize("entries", ["10.0.0.1", 7, [""], [7], ["10.0.0.0/99"], ["a b"]])
def test_an_option_that_cannot_be_used_is_named(entries: Any) -> None:
    with pytest.raises(ValueError, match="kv_peers"):
        check_peers(entries)


@pytest.mark.parametrize(
    "transfer",
    [
        "x",
        ["x"],
        {"remote_engine_id": []},
        {"remote_host": 7},
        {"lease_id": {}},
        {"remote_port": "5600"},
        {"tp_size": True},
        {"remote_num_tokens": 1.5},
        {"remote_block_ids": "x"},
        {"remote_block_ids": [1, 2]},
        {"remote_block_ids": [[1, "2"]]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [[True]]},
        {"remote_block_ids": [[1], None]},
        {"tp_size": 10**9},
        {"pp_size": 0},
        {"remote_port": -1},
        {"remote_port": 65536},
        {"remote_num_tokens": -1},
        {"remote_blocks_expiry_time": "x"},
        {"remote_request_id": "half of a pair: \ud800"},
        {"do_remote_prefill": True},
        {**HANDOVER, "remote_block_ids": []},
        {**HANDOVER, "remote_host": None},
    ],
)
def test_params_of_the_wrong_shape_are_refused(transfer: Any) -> None:
    """The engine core reads them without a net."""
    with pytest.raises(ValueError, match="kv_transfer_params"):
        check_shape(transfer)


def test_params_as_engines_and_routers_send_them_pass() -> None:
    check_shape({"do_remote_decode": True, "remote_engine_id": None, "remote_port": None})
    check_shape({"remote_engine_id": "d", "remote_host": "h", "remote_port": 1, "tp_size": 1})
    check_shape(HANDOVER)
    check_shape({"remote_block_ids": [[1, 2], []]})
    check_shape({"remote_block_ids": []})
    check_shape({"remote_block_ids": None})
