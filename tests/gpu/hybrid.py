"""Are handovers of a model with two kinds of KV cache groups right on this GPU, or an error?

    python -m tests.gpu.hybrid --out results

Starts a D and several P; every other layer of the model attends to a window of tokens only. Checks
that D answers after a handover as one engine alone does, and that it never answers out of anything
else: neither where P has used the blocks for other prompts before D comes, nor where P is killed
after its leg or while D reads. Prompts whose last token attends to a token that the base would not
load are computed by D. Read-back is off for such models. Needs no network.
Exit status: 0 right, 1 something is wrong, 2 an engine failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.client import (
    FIRST,
    Answer,
    EngineError,
    RefusedError,
    complete,
    lost,
    reset_prefix_cache,
)
from tests.gpu.compare import Difference, difference
from tests.gpu.histories import New, source
from tests.gpu.measure import Ask, Measured, in_two_pieces, new_salt, params_of
from tests.gpu.shapes import HYBRID, write_model
from tests.gpu.topology.engines import Running, Settings, running
from tests.gpu.topology.findings import Findings
from tests.gpu.topology.leases import all_free
from tests.gpu.topology.placement import Node
from tests.gpu.topology.result import as_json, environment, judged, told
from tools.bench.gpu.counters import kv_capacity
from tools.bench.gpu.engines import telling
from tools.cluster import Engine, ProcessFailedError
from tools.demo.errors import DemoError

_ANSWER = 24
_LONGEST = 3600
# Handovers that D reads at the same time.
_AT_ONCE = 8
# Prompts that come too late, and those of a P that is killed, tokens.
_LATE, _KILLED = (300, 900, 2000, 3300), (300, 1500, 3300)
# How each P ends: whether D has met it, and the seconds between D's being asked and its SIGKILL;
# None: it ends before.
_KILLS: tuple[tuple[bool, float | None], ...] = (
    (False, None),
    (True, None),
    (True, 0.005),
    (True, 0.02),
)
# Where P's params have the token with which D claims them.
_CLAIM = "claim"
# Of lost handovers: the base would not load the block in which the last token's window begins.
_WINDOW = "window"
# D's answer, or the status it refused with, and the seconds that it took.
Outcome = tuple[Answer | int, float]


@dataclass(frozen=True)
class Nodes:
    """URLs of a P and a D that stay, and where tokens come from."""

    prefill: str
    decode: str
    block: int
    rng: random.Random

    @property
    def new(self) -> New:
        return source(self.rng)

    @property
    def on_prefill(self) -> Ask:
        return partial(complete, self.prefill)

    @property
    def on_decode(self) -> Ask:
        return partial(complete, self.decode)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and return its exit status."""
    options = _arguments(argv)
    begin = time.monotonic()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    window, shape = HYBRID[options.device]
    gpus = (0,) if options.device == "cuda" else ()
    killed = min(options.killed, len(_KILLS))
    nodes = [Node("prefill", index, gpus=gpus) for index in range(1 + killed)]
    nodes.append(Node("decode", 0, gpus=gpus))
    model = write_model(out / "model-hybrid", shape)
    settings = Settings(shape, model, options.device, options.kv_gib, tuple(options.engine_args))
    result: dict[str, Any] = {
        "model": "hybrid",
        "window": window,
        "shape": dict(shape.config),
        "seed": options.seed,
        "environment": environment(options.device),
    }
    findings, errors, failed = Findings(), list[str](), False
    try:
        with running(settings, nodes, out / "logs" / "hybrid") as engines:
            result["ready_s"] = round(time.monotonic() - begin, 1)
            print(f"hybrid: engines ready after {result['ready_s']} s", flush=True)
            measure_hybrid(options, window, engines, findings)
    except (ProcessFailedError, EngineError, DemoError) as error:
        failed = True
        errors.append(str(error)[-4000:])
    result |= judged(findings, errors)
    result["seconds"] = round(time.monotonic() - begin, 1)
    path = out / "hybrid.json"
    path.write_text(as_json(result, findings.cases), encoding="utf-8")
    print("\n".join([f"== hybrid, {result['seconds']} s: {path}", *told(result)]), flush=True)
    if failed:
        return 2
    return 1 if result["problems"] else 0


def measure_hybrid(
    options: argparse.Namespace, window: int, engines: Running, findings: Findings
) -> None:
    victims = {name: one for name, one in engines.engines.items() if one.role == "prefill"}
    prefill = victims.pop("prefill-0")
    (decode,) = engines.decode
    _, block = kv_capacity(decode.url)
    nodes = Nodes(prefill.url, decode.url, block, random.Random(options.seed))
    findings.figures["block"] = block
    _handovers(options, window, nodes, findings)
    _at_once(window, nodes, findings)
    computed = sum(_is_computed(case.prompt, window, block) for case in findings.cases)
    findings.equal("computed by D for their windows", lost(decode.url).get(_WINDOW, 0), computed)
    _too_late(nodes, findings)
    for (name, victim), (met, after) in zip(victims.items(), _KILLS, strict=False):
        _killed(name, victim, met, after, nodes, findings)
    if victims and options.restart:
        _restarted(victims["prefill-1"], nodes, findings)
    findings.check("D runs", decode.is_alive(), decode.name)
    all_free((prefill.url, decode.url), findings)
    findings.figures["lost handovers"] = lost(decode.url)
    findings.figures["log"] = {one.name: telling([one]) for one in (prefill, decode)}
    if options.device == "cuda":
        copied = any("zero-copy" in line for line in findings.figures["log"][decode.name])
        findings.check("copies on the GPU", copied, f"UCX of {decode.name}")


def _handovers(options: argparse.Namespace, window: int, nodes: Nodes, findings: Findings) -> None:
    """Prompts within the window, at its edges and beyond it, one after the other."""
    block = nodes.block
    edges = [block + 1, window // 2, window - 1, window, window + 1]
    # Of the first block of the last token's window one token counts, all, or all but one.
    edges += [window + count * block + more for count in (1, 4) for more in (-1, 0, 1)]
    lengths = edges + [nodes.rng.randrange(80, _LONGEST) for _ in range(options.random)]
    findings.wanted += len(lengths)
    for length in lengths:
        prompt = nodes.new(length)
        handed = handed_over(nodes.prefill, prompt)
        groups = handed["remote_block_ids"]
        if len(groups) != 2:
            raise EngineError(f"the model has not two kinds of groups: {groups}")
        answer = complete(nodes.decode, prompt, _ANSWER, handed)
        case = compared(f"handover of {length}", prompt, answer, nodes)
        if not _is_computed(length, window, block):
            case.controls |= _wrong_kv(prompt, nodes, findings)
        findings.cases.append(case)


def _is_computed(length: int, window: int, block: int) -> bool:
    """Whether the window of a prompt's last token begins with the last token of a block."""
    return length > window and (length - window + 1) % block == 0


def _wrong_kv(prompt: list[int], nodes: Nodes, findings: Findings) -> dict[str, Difference]:
    """What D answers out of another prompt's KV: of all groups, and of each alone."""
    plain = nodes.on_prefill(prompt, salt=new_salt())
    found: dict[str, Difference] = {}
    for wrong in ((0, 1), (0,), (1,)):
        handed = handed_over(nodes.prefill, prompt)
        other = handed_over(nodes.prefill, nodes.new(len(prompt)))
        groups = [(other if at in wrong else handed)["remote_block_ids"][at] for at in (0, 1)]
        mixed = {**(other if len(wrong) == 2 else unclaimed(handed)), "remote_block_ids": groups}
        name = f"wrong group {' and '.join(map(str, wrong))}"
        try:
            answer = nodes.on_decode(prompt, params=mixed, salt=new_salt())
        except RefusedError as error:
            _count(findings, f"refused: {name}, {error.status}")
            continue
        found[name] = difference(answer.first, plain.first)
    return found


def _at_once(window: int, nodes: Nodes, findings: Findings) -> None:
    """Handovers that D reads at the same time; as noise, the same prompts without any.

    Of half of them the last token's window begins with the last token of a block.
    """
    blocks = (_LONGEST - window) // nodes.block
    lengths = [nodes.rng.randrange(80, _LONGEST) for _ in range(_AT_ONCE // 2)]
    lengths += [window + nodes.rng.randint(1, blocks) * nodes.block - 1 for _ in lengths]
    prompts = [nodes.new(length) for length in lengths]
    findings.wanted += len(prompts)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(partial(_both_legs, nodes), prompts))
        alone = list(pool.map(lambda one: nodes.on_decode(one, _ANSWER, salt=new_salt()), prompts))
    for prompt, answer, other in zip(prompts, answers, alone, strict=True):
        case = compared(f"at once, {len(prompt)}", prompt, answer, nodes)
        case.noise["at_once"] = difference(
            other.first, nodes.on_prefill(prompt, salt=new_salt()).first
        )
        findings.cases.append(case)


def _both_legs(nodes: Nodes, prompt: list[int]) -> Answer:
    return complete(nodes.decode, prompt, _ANSWER, handed_over(nodes.prefill, prompt))


def _too_late(nodes: Nodes, findings: Findings) -> None:
    """P has freed the prompts' blocks, and used them for others, before D reads them."""
    prompts = [nodes.new(length) for length in _LATE]
    handed = [handed_over(nodes.prefill, prompt) for prompt in prompts]
    reset_prefix_cache(nodes.prefill)  # waits until they are freed
    capacity, _ = kv_capacity(nodes.prefill)
    for _ in range(2 * capacity // _LONGEST + 1):
        nodes.on_prefill(nodes.new(_LONGEST))
    before = lost(nodes.decode)
    for prompt, params in zip(prompts, handed, strict=True):
        outcome = _outcome(prompt, params, nodes)
        _judge(f"too late, {len(prompt)}", prompt, outcome, nodes, findings)
    grown = {key: n - before.get(key, 0) for key, n in lost(nodes.decode).items()}
    findings.equal(
        "too late, counted as", {k: n for k, n in grown.items() if n}, {"expired": len(prompts)}
    )
    for prompt, params in zip(prompts, handed, strict=True):
        case = _later(f"after too late, {len(prompt)}", prompt, nodes)
        try:
            answer = nodes.on_decode(prompt, params=unclaimed(params), salt=new_salt())
            plain = nodes.on_prefill(prompt, salt=new_salt())
            case.controls["unclaimed"] = difference(answer.first, plain.first)
        except RefusedError as error:
            _count(findings, f"refused: too late and unclaimed, {error.status}")
        findings.wanted += 1
        findings.cases.append(case)


def _killed(
    name: str, victim: Engine, met: bool, after: float | None, nodes: Nodes, findings: Findings
) -> None:
    """P ends before D is asked, or so many seconds after."""
    name += " killed before" if after is None else f" killed after {after * 1e3:.0f} ms"
    if met:
        _both_legs(replace(nodes, prefill=victim.url), nodes.new(700))
    else:
        name += " it was met"
    prompts = [nodes.new(length) for length in _KILLED]
    handed = [handed_over(victim.url, prompt) for prompt in prompts]
    if after is None:
        victim.kill()
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [
            pool.submit(_outcome, prompt, params, nodes)
            for prompt, params in zip(prompts, handed, strict=True)
        ]
        if after is not None:
            time.sleep(after)
            victim.kill()
        outcomes = [one.result() for one in asked]
    statuses = [200 if isinstance(found, Answer) else found for found, _ in outcomes]
    findings.figures.setdefault("killed", {})[name] = statuses
    if after is None:
        findings.equal(f"{name}: no answer", statuses, [500] * len(prompts))
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        _judge(f"{name}, {len(prompt)}", prompt, outcome, nodes, findings)
    for prompt, params in zip(prompts, handed, strict=True):
        findings.wanted += 1
        findings.cases.append(_later(f"after {name}, {len(prompt)}", prompt, nodes))
        if after is None:
            _unclaimed_of_the_dead(prompt, params, nodes, findings)


def _unclaimed_of_the_dead(
    prompt: list[int], params: Mapping[str, Any], nodes: Nodes, findings: Findings
) -> None:
    """For the figures only: as the base asks."""
    try:
        answer = nodes.on_decode(prompt, params=unclaimed(params), salt=new_salt())
    except RefusedError as error:
        _count(findings, f"refused: P gone and unclaimed, {error.status}")
        return
    plain = nodes.on_prefill(prompt, salt=new_salt())
    rms = difference(answer.first, plain.first).rms
    findings.figures.setdefault("P gone and unclaimed, answered, rms", []).append(rms)


def _restarted(victim: Engine, nodes: Nodes, findings: Findings) -> None:
    """At the address of one that was killed, with an id of its own."""
    victim.start()
    victim.wait()
    prompt = nodes.new(1500)
    findings.wanted += 1
    answer = complete(nodes.decode, prompt, _ANSWER, handed_over(victim.url, prompt))
    findings.cases.append(compared("handover of a P started again", prompt, answer, nodes))


def _outcome(prompt: list[int], params: Mapping[str, Any], nodes: Nodes) -> Outcome:
    begin = time.monotonic()
    try:
        found: Answer | int = complete(nodes.decode, prompt, _ANSWER, params)
    except RefusedError as error:
        found = error.status
    return found, round(time.monotonic() - begin, 3)


def _judge(
    name: str, prompt: list[int], outcome: Outcome, nodes: Nodes, findings: Findings
) -> None:
    """D may fail the request with 500; an answer is compared."""
    found, seconds = outcome
    if isinstance(found, Answer):
        findings.wanted += 1
        findings.cases.append(compared(f"{name}, answered", prompt, found, nodes))
    else:
        findings.equal(f"{name}: status", found, 500)
    findings.figures.setdefault("seconds until D had failed or answered", {})[name] = seconds


def compared(name: str, prompt: list[int], answer: Answer, nodes: Nodes) -> Measured:
    """D's first and last token, and what its prefix cache has kept, beside a recompute on P."""
    on_prefill, on_decode = nodes.on_prefill, nodes.on_decode
    plain, longer = on_prefill(prompt, salt=new_salt()), prompt + answer.tokens[:-1]
    plain_longer = on_prefill(longer, salt=new_salt())
    case = _later(name, prompt, nodes)
    case.checks |= {
        "handover": difference(answer.first, plain.first),
        "last_token": difference(answer.last, plain_longer.first),
        "later_longer": difference(on_decode(longer).first, plain_longer.first),
    }
    alone = on_decode(prompt, _ANSWER, salt=new_salt())
    alone_longer = on_prefill(prompt + alone.tokens[:-1], salt=new_salt())
    halves = in_two_pieces(on_prefill, prompt, max(1, len(prompt) // 2))
    # As if the last block in front of the last token were another prompt's.
    end = len(prompt) - 1
    changed = prompt[: end - nodes.block] + nodes.new(nodes.block) + prompt[end:]
    case.controls["another_block"] = difference(
        on_prefill(changed, salt=new_salt()).first, plain.first
    )
    case.noise |= {
        "last_token": difference(alone.last, alone_longer.first),
        "two_pieces": difference(halves.first, plain.first),
        "last_block": difference(in_two_pieces(on_decode, prompt, end).first, plain.first),
    }
    return case


def _later(name: str, prompt: list[int], nodes: Nodes) -> Measured:
    """A plain request to D, which may use its prefix cache; and the same without."""
    plain = nodes.on_prefill(prompt, salt=new_salt())
    later = nodes.on_decode(prompt)
    case = Measured(name, len(prompt), nodes.block, 0, 0, cached={"later_decode": later.cached})
    case.checks = {"later_decode": difference(later.first, plain.first)}
    other = nodes.on_decode(prompt, salt=new_salt())
    case.noise = {"other_engine": difference(other.first, plain.first)}
    return case


def handed_over(prefill: str, prompt: list[int]) -> dict[str, Any]:
    """P's leg; its params."""
    return params_of(complete(prefill, prompt, params=FIRST))


def unclaimed(params: Mapping[str, Any]) -> dict[str, Any]:
    """As those of a stock P, which D reads without a question."""
    return {key: value for key, value in params.items() if key != _CLAIM}


def _count(findings: Findings, name: str) -> None:
    findings.figures[name] = findings.figures.get(name, 0) + 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.hybrid",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON and logs")
    parser.add_argument("--random", type=int, default=12, help="handovers of random lengths")
    parser.add_argument("--killed", type=int, default=4, help="P that are killed, at most 4")
    parser.add_argument("--no-restart", dest="restart", action="store_false")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kv-gib", type=int, default=2, help="KV cache of each engine, GiB")
    parser.add_argument("engine_args", nargs="*", help="after --: more arguments of vllm serve")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
