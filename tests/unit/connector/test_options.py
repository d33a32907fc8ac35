"""An option that cannot be meant ends the start, with its name and what it may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.bidir.connector.options import Options, is_on, read_options


def config(connector: str = "NixlConnector", role: str | None = "kv_both", **extra: Any) -> Any:
    return SimpleNamespace(
        kv_connector=connector,
        kv_role=role,
        get_from_extra_config=lambda name, default: extra.get(name, default),
    )


def test_without_options_the_defaults_hold() -> None:
    assert read_options(config()) == Options(timeout_s=2.0, progress_delay_us=None)
    assert not is_on(config())


@pytest.mark.parametrize("value", [0.5, 2, 30.0])
def test_the_timeout_is_seconds(value: float) -> None:
    assert read_options(config(read_back_timeout=value)).timeout_s == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("read_back_timeout", 0),
        ("read_back_timeout", -1),
        ("read_back_timeout", "2"),
        ("read_back_timeout", True),
        ("read_back_timeout", float("inf")),
        ("read_back_timeout", float("nan")),
        ("kv_recompute_threshold", -1),
        ("kv_recompute_threshold", 1.5),
        ("kv_recompute_threshold", None),
        ("decoder_kv_blocks_ttl", 0),
        ("decoder_kv_blocks_ttl", "480"),
        ("kv_lease_duration", 0),
        ("nixl_progress_delay", -1),
        ("nixl_progress_delay", 0.5),
        ("kv_peers", "10.0.0.1"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        read_options(config(**{name: value}))


@pytest.mark.parametrize("value", ["true", 1, None])
def test_the_switch_is_true_or_false(value: Any) -> None:
    with pytest.raises(ValueError, match="bidirectional_kv_xfer must be true or false"):
        is_on(config(bidirectional_kv_xfer=value))


@pytest.mark.parametrize("value", [0, 100])
def test_the_progress_delay_is_microseconds(value: int) -> None:
    assert read_options(config(nixl_progress_delay=value)).progress_delay_us == value


def test_a_threshold_of_zero_is_allowed() -> None:
    read_options(config(kv_recompute_threshold=0))


def test_options_that_contradict_each_other_say_which() -> None:
    with pytest.raises(ValueError, match="NixlPushConnector"):
        read_options(config(connector="NixlPushConnector"))
    with pytest.raises(ValueError, match="kv_role"):
        read_options(config(role=None))
