"""A client that goes frees what its engines do for it, through the router."""

from __future__ import annotations

import random

import httpx
import pytest

from tests.e2e.conftest import Route
from tests.e2e.turns import MODEL, http, metric, tokens, wait_until
from tools.cluster import Cluster, Engine

# More than D generates until it hears that nobody reads.
ANSWER = 6000


def under_way(engine: Engine) -> float:
    return metric(engine, "vllm:num_requests_running") + metric(engine, "vllm:num_requests_waiting")


@pytest.mark.parametrize("streamed", [True, False])
def test_d_ends_what_nobody_waits_for(streamed: bool, pair: Cluster, route: Route) -> None:
    d = pair.decode[0]
    prompt = tokens(300, random.Random(f"gone {streamed}").randrange(1 << 30))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True}
    before = metric(d, "vllm:generation_tokens_total")
    used = metric(d, "vllm:kv_cache_usage_perc")
    with route(pair) as router:
        with http() as client:
            request = client.build_request(
                "POST",
                f"{router.url}/v1/completions",
                json={**body, "stream": streamed},
                timeout=None if streamed else 1.0,
            )
            if streamed:
                response = client.send(request, stream=True)
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                wait_until(lambda: under_way(d) == 1, 5, "D does not run")
                response.close()
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.send(request)
        wait_until(lambda: not under_way(d), 5, "D goes on")
        # It was cut, it did not come to its end; and nothing of it is kept.
        assert 0 < metric(d, "vllm:generation_tokens_total") - before < ANSWER
        wait_until(lambda: metric(d, "vllm:kv_cache_usage_perc") <= used, 5, "D holds blocks")
        assert not under_way(pair.prefill[0])
