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
        ("decoder_kv_lease_duration", 0),
        ("decoder_kv_lease_duration", "15"),
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


def test_leases_are_off_unless_asked_for() -> None:
    assert read_options(config()).lease_s is None
    found = read_options(config(decoder_kv_lease_duration=15))
    assert (found.lease_s, found.lease_budget, found.hold_s, found.ttl_s) == (15, 0.5, 30, 480)


@pytest.mark.parametrize("value", [0, 1.1, "half", True, float("nan")])
def test_the_lease_budget_is_a_share(value: Any) -> None:
    extra = {"decoder_kv_lease_duration": 15, "decoder_kv_lease_budget": value}
    with pytest.raises(ValueError, match="decoder_kv_lease_budget must be a share"):
        read_options(config(**extra))


@pytest.mark.parametrize("name", ["decoder_kv_lease_budget", "decoder_kv_hold_duration"])
def test_an_option_of_leases_needs_leases(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs decoder_kv_lease_duration"):
        read_options(config(**{name: 0.5}))


def test_a_lease_is_no_longer_than_a_turn_may_be_kept() -> None:
    with pytest.raises(ValueError, match="must not exceed decoder_kv_blocks_ttl"):
        read_options(config(decoder_kv_lease_duration=15, decoder_kv_blocks_ttl=10))
