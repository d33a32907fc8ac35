"""Agents name a process: who restarts has others, whoever lies in params is not believed."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.bidir.connector.agents import are_met, digest, parse_agents, to_params

ONE, OTHER = digest(b"one"), digest(b"other")


def test_they_survive_the_way_through_params() -> None:
    assert parse_agents(to_params([ONE, OTHER])) == (ONE, OTHER)


@pytest.mark.parametrize(
    "value", [None, [], "x", [1], ["zz" * 8], ["00"], [ONE.hex()] * 2000, {"0": ONE.hex()}]
)
def test_what_is_no_list_of_agents_is_none(value: Any) -> None:
    assert parse_agents(value) is None


def test_those_that_were_met_must_be_the_engines_own_by_rank() -> None:
    assert are_met({0: ONE}, [ONE])
    assert are_met({1: OTHER}, [ONE, OTHER])
    assert not are_met({0: OTHER}, [ONE])
    assert not are_met({1: ONE}, [ONE])
    assert not are_met({0: ONE, 1: ONE}, [ONE, OTHER])
    assert not are_met({}, [ONE]), "nobody was met"
