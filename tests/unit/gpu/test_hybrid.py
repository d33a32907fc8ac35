"""Which answers are taken for wrong, over engines that only play handovers."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.gpu import hybrid
from tests.gpu.client import FIRST, Answer, RefusedError
from tests.gpu.shapes import HYBRID
from tests.gpu.topology import leases
from tests.gpu.topology.engines import Running
from tests.gpu.topology.findings import Findings
from tests.gpu.topology.result import judged

OPTIONS = argparse.Namespace(seed=1, random=2, restart=True, device="cpu")


class Played:
    """A D that is as the base's, or that `claims`; P's blocks are gone after a reset or a kill."""

    def __init__(self, claims: bool) -> None:
        self.claims = claims
        self.gone: set[str] = set()
        self.handed: dict[str, list[int]] = {}
        self.lost = 0
        self.computed = 0
        self.filed: dict[str, bool] = {}

    def complete(
        self,
        url: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        params: Mapping[str, Any] | None = None,
        salt: str | None = None,
    ) -> Answer:
        if params == FIRST:
            name = f"{url} {len(self.handed)}"
            self.handed[name] = list(prompt)
            blocks = [[f"{name} near"], [f"{name} far"]]
            return self._answer(
                prompt, 1, True, {"of": name, "claim": "token", "remote_block_ids": blocks}
            )
        key, right = str(list(prompt)), True
        if params is not None:
            if self.claims and len(prompt) > 512 and (len(prompt) - 511) % 16 == 0:
                self.computed += 1
                return self._answer(prompt, max_tokens, True, None)
            of = params["of"]
            whole = [[f"{of} near"], [f"{of} far"]] == params["remote_block_ids"]
            right = whole and of not in self.gone and self.handed[of] == prompt
            if of in self.gone and self.claims and "claim" in params:
                self.lost += 1
                raise RefusedError(500, "lost")
        if url == "d" and salt is None:
            right = self.filed.setdefault(key, right)
        return self._answer(prompt, max_tokens, right, None)

    def _answer(
        self, prompt: Sequence[int], count: int, right: bool, params: dict[str, Any] | None
    ) -> Answer:
        value = -random.Random(f"{list(prompt)} {right}").random()
        odds = {1: value, 2: -9.0}
        last = {1: -random.Random(f"{[*prompt, *[7] * (count - 1)]} {right}").random(), 2: -9.0}
        return Answer([7] * count, odds, params, 0, last)

    def reset(self, url: str) -> None:
        self.gone |= {one for one in self.handed if one.startswith(f"{url} ")}


class Victim:
    log_path = None

    def __init__(self, name: str, role: str, url: str, played: Played) -> None:
        self.name, self.role, self.url, self._played = name, role, url, played

    def kill(self) -> None:
        self._played.reset(self.url)

    def start(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def is_alive(self) -> bool:
        return True


def problems(monkeypatch: pytest.MonkeyPatch, claims: bool) -> tuple[list[str], Findings]:
    played, findings = Played(claims), Findings()
    monkeypatch.setattr(hybrid, "complete", played.complete)
    monkeypatch.setattr(hybrid, "reset_prefix_cache", played.reset)
    monkeypatch.setattr(leases, "reset_prefix_cache", lambda url: None)
    monkeypatch.setattr(hybrid, "kv_capacity", lambda url: (4096, 16))
    monkeypatch.setattr(
        hybrid, "lost", lambda url: {"expired": played.lost, "window": played.computed}
    )
    monkeypatch.setattr(hybrid, "telling", lambda engines: [])
    names = [*((f"prefill-{n}", "prefill", f"p{n}") for n in range(4)), ("decode-0", "decode", "d")]
    engines: Any = {name: Victim(name, role, url, played) for name, role, url in names}
    hybrid.measure_hybrid(OPTIONS, 512, Running(engines), findings)
    found: list[str] = judged(findings, ())["problems"]
    return found, findings


def test_a_d_that_claims_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found, findings = problems(monkeypatch, claims=True)
    assert found == []
    names = {name for case in findings.cases for name in case.controls}
    wrong = {"wrong group 0 and 1", "wrong group 0", "wrong group 1"}
    assert names == {*wrong, "unclaimed", "another_block"}
    # Two edges and half of those at once.
    assert findings.figures["lost handovers"]["window"] >= 6


def test_a_d_that_answers_from_what_it_finds_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 200 after P has used the blocks for others or is gone, and out of its cache after."""
    found, _ = problems(monkeypatch, claims=False)
    assert any(one.startswith("too late, 900, answered: handover differs") for one in found)
    assert any(one.startswith("after too late, 900: later_decode differs") for one in found)
    assert any(one.startswith("prefill-1 killed before it was met: no answer") for one in found)
    assert any(one.startswith("computed by D for their windows") for one in found)


@pytest.mark.parametrize("device", HYBRID)
def test_every_other_layer_has_a_window(device: str) -> None:
    window, shape = HYBRID[device]
    config = shape.config
    assert config["sliding_window"] == window
    assert len(config["layer_types"]) == config["num_hidden_layers"]
    assert set(config["layer_types"]) == {"sliding_attention", "full_attention"}
