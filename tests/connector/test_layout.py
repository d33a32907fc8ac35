"""Which KV cache layout an engine is asked for, by the base's own way of asking."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.bidir.connector import layout
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.connector.sim import vllm_config


@pytest.fixture
def config(model: Path, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """An engine on a GPU, as far as the question goes."""
    monkeypatch.setattr(layout.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(
        layout.current_platform, "get_device_capability", lambda: DeviceCapability(9, 0)
    )
    made = vllm_config(model, "p")
    made.kv_transfer_config = transfer()
    return made


def transfer(connector: str = "NixlConnector", bidirectional: bool = True, **more: Any) -> Any:
    return KVTransferConfig(
        kv_connector=connector,
        kv_role="kv_producer",
        kv_buffer_device=more.pop("device", "cuda"),
        kv_connector_extra_config={"bidirectional_kv_xfer": bidirectional, **more},
    )


def test_the_engine_is_asked_for_it(config: VllmConfig) -> None:
    assert get_kv_connector_cache_layout(config) == "BLHNC"


def test_nothing_changes_without_read_back(config: VllmConfig) -> None:
    config.kv_transfer_config = transfer(bidirectional=False)
    assert get_kv_connector_cache_layout(config) == "LBHNC"


def test_nothing_changes_on_a_cpu(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout.current_platform, "is_cuda", lambda: False)
    assert get_kv_connector_cache_layout(config) == "LBHNC"


@pytest.mark.parametrize(
    ("capability", "backend", "layout_name"),
    [
        ((8, 0), None, "BLHNC"),
        ((9, 0), "FLASH_ATTN", "BLHNC"),
        ((9, 0), "FLASHINFER", "LBHNC"),
        ((9, 0), "TRITON_ATTN", "LBHNC"),
        ((10, 0), None, "LBHNC"),
        ((10, 0), "FLASH_ATTN", "LBHNC"),
    ],
)
def test_only_kernels_that_were_seen_with_it_get_it(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    backend: str | None,
    layout_name: str,
) -> None:
    """Others may cut a block in several of their own, and the base does not start with that."""
    monkeypatch.setattr(
        layout.current_platform, "get_device_capability", lambda: DeviceCapability(*capability)
    )
    config.attention_config.backend = AttentionBackendEnum[backend] if backend else None
    assert get_kv_connector_cache_layout(config) == layout_name


@pytest.mark.parametrize(("backend", "layout_name"), [(None, "LBHNC"), ("FLASH_ATTN", "BLHNC")])
def test_with_fp8_the_base_may_choose_other_kernels(
    config: VllmConfig, backend: str | None, layout_name: str
) -> None:
    config.cache_config.cache_dtype = "fp8"
    config.attention_config.backend = AttentionBackendEnum[backend] if backend else None
    assert get_kv_connector_cache_layout(config) == layout_name


def test_nothing_changes_behind_a_host_buffer(config: VllmConfig) -> None:
    config.kv_transfer_config = transfer(device="cpu")
    assert get_kv_connector_cache_layout(config) == "LBHNC"


def test_beside_another_connector_both_ask_for_the_same(config: VllmConfig) -> None:
    """Else the base does not start: "KV cache layout mismatch"."""
    children = [
        {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"bidirectional_kv_xfer": name == "NixlConnector"},
        }
        for name in ("NixlConnector", "OffloadingConnector")
    ]
    config.kv_transfer_config = transfer("MultiConnector", connectors=children)
    assert get_kv_connector_cache_layout(config) == "LBHNC"


@pytest.mark.parametrize(
    "change",
    [
        {"use_mla": True},
        {"is_hybrid": True},
        {"is_encoder_decoder": True},
        {"get_sliding_window": lambda: 4096},
        {"attention_chunk_size": 8192},
        {"hf_text_config": SimpleNamespace(layer_types=["full_attention", "sliding_attention"])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_layers_that_differ_keep_the_bases_layout(
    config: VllmConfig, change: dict[str, Any]
) -> None:
    plain = {
        "use_mla": False,
        "is_hybrid": False,
        "is_encoder_decoder": False,
        "get_sliding_window": lambda: None,
        "attention_chunk_size": None,
        "hf_text_config": SimpleNamespace(layer_types=["full_attention"]),
    }
    asked = SimpleNamespace(
        kv_transfer_config=config.kv_transfer_config,
        speculative_config=None,
        attention_config=config.attention_config,
        cache_config=config.cache_config,
        model_config=SimpleNamespace(**plain),
    )
    assert layout.preferred(asked, "LBHNC") == "BLHNC"
    asked.model_config = SimpleNamespace(**(plain | change))
    assert layout.preferred(asked, "LBHNC") == "LBHNC"
    assert layout.preferred(asked, None) is None
