"""Each seam of the base reaches our code; each of these fails without its patch."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.bidir.connector.connector import BidirConnector
from vllm.bidir.connector.hooks import check_kv_transfer_params, recomputes_failed_load
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector, NixlPushConnector
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor

from tests.connector.sim import Engine, vllm_config
from tests.connector.test_simulated import finished_turn, numbers

HANDOVER = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[1]],
}


def chosen(name: str, **extra: object) -> type:
    config = KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=dict(extra)
    )
    return KVConnectorFactory.get_connector_class(config)


def test_the_factory_gives_the_verifying_connector() -> None:
    assert chosen("NixlConnector", bidirectional_kv_xfer=True) is BidirConnector
    assert chosen("NixlPullConnector", bidirectional_kv_xfer=True) is BidirConnector


def test_without_the_option_the_base_is_chosen_as_before() -> None:
    assert chosen("NixlConnector") is NixlPullConnector
    assert chosen("NixlConnector", bidirectional_kv_xfer=False) is NixlPullConnector
    assert chosen("NixlPushConnector") is NixlPushConnector


def test_multi_connector_finds_our_metrics_by_class_name() -> None:
    chosen("NixlConnector", bidirectional_kv_xfer=True)
    assert KVConnectorFactory.get_connector_class_by_name("BidirConnector") is BidirConnector


def test_a_prefix_cache_reset_ends_kept_turns(model: Path) -> None:
    d = Engine(model, "d")
    finished_turn(d, list(range(100)), [1] * 10)
    assert len(d.bidir.kept) == 1
    d.scheduler.reset_prefix_cache()
    assert len(d.bidir.kept) == 0


def test_other_weights_make_and_take_no_old_kv(model: Path) -> None:
    """Also when only one of the two nodes has been updated."""
    rng = random.Random(12)
    p, d = Engine(model, "p"), Engine(model, "d")
    h, out = numbers(rng, 300), numbers(rng, 40)
    params, _ = finished_turn(d, h, out)
    core = SimpleNamespace(scheduler=p.scheduler)
    EngineCore.set_weight_version(core, "2")
    p.run(h + out + [1], params, source=d)
    assert p.orders == []
    # D is updated too: what it kept from before is gone, what it keeps from now on is read.
    EngineCore.set_weight_version(SimpleNamespace(scheduler=d.scheduler), "2")
    assert len(d.bidir.kept) == 0
    params, _ = finished_turn(d, h, out)
    p.scheduler.reset_prefix_cache()
    p.run(h + out + [2], params, source=d)
    assert len(p.orders) == 1


def test_a_lost_read_back_is_recomputed_under_policy_fail(model: Path) -> None:
    rng = random.Random(9)
    p, d = Engine(model, "p", policy="fail"), Engine(model, "d")
    h, out = numbers(rng, 300), numbers(rng, 40)
    params, request_id = finished_turn(d, h, out)
    d.expire(request_id)
    # `run` demands that the request ends by length, not by error.
    p.run(h + out + [1], params, source=d)
    assert len(p.orders) == 1


def test_params_that_name_another_host_are_refused(model: Path) -> None:
    """In the frontend, before the engine sees the request; the server makes it a 400."""
    config = vllm_config(model, "p", kv_peers=["127.0.0.0/8"])
    processor = InputProcessor.__new__(InputProcessor)
    processor.vllm_config = config
    processor.model_config = config.model_config
    processor.speculative_config = None
    processor.structured_outputs_config = config.structured_outputs_config
    processor.renderer = SimpleNamespace(tokenizer=None)

    def ask(transfer: object) -> None:
        params = SamplingParams(extra_args={"kv_transfer_params": transfer})
        processor._validate_params(params, ("generate",))

    ask({"remote_host": "127.0.0.1"})
    ask({"remote_host": None})
    with pytest.raises(VLLMValidationError, match="not one of this engine's kv_peers"):
        ask({"remote_host": "10.1.2.3"})
    # What is no object at all would end the engine core.
    with pytest.raises(VLLMValidationError, match="must be an object"):
        ask("x")


@pytest.mark.parametrize(("host", "told"), [("127.0.0.1", 1), ("10.1.2.3", 0)])
async def test_a_rejected_request_does_not_reach_another_host_either(
    model: Path, host: str, told: int
) -> None:
    """The server tells the prefill node of a request that it has rejected: also a request that was
    rejected because of the host that it names."""
    sent: list[object] = []

    async def add_request_async(request: object) -> None:
        sent.append(request)

    frontend = SimpleNamespace(
        vllm_config=vllm_config(model, "p", kv_peers=["127.0.0.0/8"]),
        engine_core=SimpleNamespace(add_request_async=add_request_async),
    )
    with contextlib.suppress(VLLMValidationError):
        await AsyncLLM.notify_kv_transfer_request_rejected(
            frontend, "r", {**HANDOVER, "remote_host": host}
        )
    assert len(sent) == told


def multi(*children: dict[str, object]) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": list(children)},
    )


def test_kv_peers_hold_within_a_multi_connector_too() -> None:
    child = {
        "kv_connector": "NixlConnector",
        "kv_connector_extra_config": {"kv_peers": ["10.0.0.1"]},
    }
    config: Any = SimpleNamespace(kv_transfer_config=multi({"kv_connector": "Other"}, child))
    check_kv_transfer_params(config, {**HANDOVER, "remote_host": "10.0.0.1"})
    with pytest.raises(VLLMValidationError, match="kv_peers"):
        check_kv_transfer_params(config, {**HANDOVER, "remote_host": "evil.example"})


def test_other_connectors_params_are_their_own() -> None:
    other = KVTransferConfig(kv_connector="MoRIIOConnector", kv_role="kv_consumer")
    config: Any = SimpleNamespace(kv_transfer_config=other)
    check_kv_transfer_params(config, {"do_remote_prefill": True, "remote_block_ids": [1, 2]})


def test_another_connectors_failed_load_keeps_its_policy() -> None:
    request: Any = SimpleNamespace(kv_transfer_params={"do_remote_decode": True})
    assert not recomputes_failed_load(SimpleNamespace(), request)
