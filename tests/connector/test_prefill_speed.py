"""What P learns of how long computing takes, over real schedulers."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.sim import FIRST_TURN, Engine
from tests.connector.test_scheduling import turn, unrelated
from tests.connector.test_simulated import numbers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A second goes by with each look, so that a prompt never takes no time."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr("vllm.bidir.connector.scheduler.time.monotonic", monotonic)
    return now


def test_prompts_that_are_computed_tell_how_long_it_takes(model: Path, clock: Any) -> None:
    p = Engine(model, "p")
    assert p.bidir._speed.seconds(1000) is None
    p.run(unrelated(800), FIRST_TURN)
    assert p.bidir._speed.seconds(800) is not None
    p.forget()


def test_a_read_back_says_how_long_computing_it_would_take(model: Path, clock: Any) -> None:
    p, d = Engine(model, "p"), Engine(model, "d")
    told, params = turn(d, 600)
    p.run(told + unrelated(20), params, source=d)
    (first,) = p.ordered.values()
    assert first.compute_s is None, "nothing is known yet"
    assert p.bidir._speed.seconds(600) is None, "what is read takes no computing"
    p.run(unrelated(800), FIRST_TURN)
    told, params = turn(d, 601)
    p.run(told + unrelated(20), params, source=d)
    _, second = p.ordered.values()
    assert second.compute_s == p.bidir._speed.seconds(second.total - second.local)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_aborted_prompt_tells_nothing(model: Path, clock: Any, async_scheduling: bool) -> None:
    """With steps that overlap its tokens count as computed as soon as they are scheduled."""
    p = Engine(
        model,
        "p",
        batched_tokens=1024 if not async_scheduling else 4096,
        async_scheduling=async_scheduling,
    )
    request = p.add(numbers(random.Random(7), 2000), FIRST_TURN)
    p.step()
    p.abort(request)
    assert p.bidir._speed.seconds(2000) is None
    assert len(p.bidir._speed) == 0


def test_a_preempted_prompt_tells_nothing(model: Path, clock: Any) -> None:
    """What had been computed is in the prefix cache, and its statistics are of the first time."""
    p = Engine(model, "p", blocks=400, batched_tokens=512)
    request = p.add(unrelated(3000), FIRST_TURN)
    p.step()
    p.step()
    p.scheduler.running.remove(request)
    p.scheduler._preempt_request(request, 0.0)
    p.serve(request)
    assert p.bidir._speed.seconds(3000) is None
    assert len(p.bidir._speed) == 0


def test_what_another_connector_loads_is_not_computed(model: Path) -> None:
    speed = Engine(model, "p").bidir
    for external, known in ((512, 0), (0, 1)):
        stats = SimpleNamespace(num_external_cached_tokens=external, num_computed_tokens=1000)
        speed._begin_computing(
            SimpleNamespace(request_id="r", prefill_stats=stats, num_preemptions=0)
        )
        assert len(speed._speed) == known
