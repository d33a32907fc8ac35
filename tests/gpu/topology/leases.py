"""Leases of one D over all its ranks, and what a lease that is lost does to a read-back."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

from tests.gpu.client import (
    EngineError,
    complete,
    decisions,
    lease_ids,
    leases,
    release,
    renew,
    reset_prefix_cache,
    tokens_read,
)
from tests.gpu.compare import difference
from tests.gpu.histories import source
from tests.gpu.measure import (
    Measured,
    Servers,
    first_turn,
    give_back,
    in_two_pieces,
    new_salt,
    params_of,
)
from tests.gpu.topology.findings import Findings

_KEPT, _PROMPT, _ANSWER = 3, 700, 8
_HELD = ("leases", "blocks", "holds")


def lease_calls(servers: Servers, ranks: int, rng: random.Random, findings: Findings) -> None:
    """Turns are kept on each of `ranks`, counted, renewed and given back there."""
    new, decode = source(rng), servers.decode
    nothing_kept("before", decode, findings)
    kept: list[str] = []
    for rank in range(ranks):
        where = Servers(servers.prefill, decode, decode_rank=rank if ranks > 1 else None)
        turns = [first_turn(new(_PROMPT), _ANSWER, where).answer for _ in range(_KEPT)]
        kept += lease_ids(*turns)
    of_rank = Counter(lease_id.split("-")[0] for lease_id in kept)
    findings.equal("leases by rank", dict(of_rank), {f"d{rank}": _KEPT for rank in range(ranks)})
    totals = leases(decode)
    findings.equal("leases that D counts", totals["leases"], ranks * _KEPT)
    findings.check("blocks that leases keep", totals["blocks"] > 0, str(totals["blocks"]))
    findings.equal("leases renewed", len(renew(decode, kept)), ranks * _KEPT)
    findings.equal("leases given back", len(release(decode, kept)), ranks * _KEPT)
    findings.equal("leases renewed afterwards", len(renew(decode, kept)), 0)
    nothing_kept("after", decode, findings)


def nothing_kept(when: str, decode: str, findings: Findings) -> None:
    """No lease, block or hold on any rank."""
    totals = leases(decode)
    found = {one["rank"]: [one[name] for name in _HELD] for one in totals["ranks"]}
    right = bool(found) and not any(any(held) for held in found.values())
    findings.check(f"nothing kept {when}, by rank", right, f"{', '.join(_HELD)}: {found}")


def all_free(urls: Sequence[str], findings: Findings) -> None:
    """The engines' pools are whole: what a rank still reported as in use would be missing."""
    begin, kept = time.monotonic(), []
    for url in urls:
        try:
            reset_prefix_cache(url)
        except EngineError as error:
            kept.append(str(error))
    findings.check("all blocks are free", not kept, "; ".join(kept) or f"on {len(urls)} engines")
    findings.figures["seconds until all blocks were free"] = round(time.monotonic() - begin, 1)


def lost_before_the_read(servers: Servers, rng: random.Random, findings: Findings) -> None:
    """D has given the turn back, and P does not know yet: it computes, and counts that."""
    new = source(rng)
    turn = first_turn(new(_PROMPT), _ANSWER, servers)
    prompt = turn.told + new(100)
    findings.equal("lease released", len(release(servers.decode, lease_ids(turn.answer))), 1)
    reset_prefix_cache(servers.prefill)  # or P has the prompt by itself, and nothing to ask for
    before, read = decisions(servers.prefill), tokens_read(servers.prefill)
    offered = complete(servers.prefill, prompt, params=params_of(turn.answer))
    answer = complete(servers.decode, prompt, _ANSWER, params_of(offered), rank=servers.answer_rank)
    give_back(servers.decode, answer)
    after = decisions(servers.prefill)
    grown = {key: count - before.get(key, 0) for key, count in after.items()}
    counted = {key: count for key, count in grown.items() if count}
    findings.equal("a lost lease is counted as", counted, {"hold_lost": 1})
    plain = complete(servers.prefill, prompt, salt=new_salt())
    block = params_of(turn.answer)["prefix_proof"]["block_size"]
    case = Measured(
        "lease_lost", len(prompt), block, tokens_read(servers.prefill) - read, expected=0
    )
    case.checks = {
        "read_back": difference(offered.first, plain.first),
        "decode": difference(answer.first, plain.first),
    }
    cut = in_two_pieces(
        lambda *args, **more: complete(servers.prefill, *args, **more), prompt, len(turn.prompt)
    )
    case.noise = {"two_pieces": difference(cut.first, plain.first)}
    findings.cases.append(case)
    findings.wanted += 1
