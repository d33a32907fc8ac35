"""The base release's own multi-turn benchmark: what it is to ask, and what it has measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.errors import BenchError
from tools.bench.records import Record

_SENTENCES = (
    "A prefill node computes the prompt and a decode node writes the answer.",
    "The next question begins with everything that was said before.",
    "What the decode node has kept need not be computed again.",
    "Blocks are read in the order in which they were written.",
    "A history that was edited is computed from the place of the edit.",
)


def write_workload(
    folder: Path, prompt_tokens: int, turns: int, conversations: int, output_tokens: int
) -> Path:
    """Write the benchmark's input: conversations whose first prompt is about this long.

    `turns`: questions of each. The text is ours, and long enough for any tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = (conversations + 1) * (prompt_tokens + 4096) // 4
    text = folder / "text.txt"
    text.write_text(
        "".join(f"{n}. {_SENTENCES[n % len(_SENTENCES)]}\n" for n in range(lines)),
        encoding="utf-8",
    )

    def constant(value: int) -> dict[str, Any]:
        return {"distribution": "constant", "value": value}

    question = min(128, prompt_tokens // 4)
    workload = {
        "filetype": "generate_conversations",
        "num_conversations": conversations,
        "text_files": [str(text.absolute())],
        "prompt_input": {
            "num_turns": constant(2 * turns),
            "common_prefix_num_tokens": constant(0),
            "prefix_num_tokens": constant(prompt_tokens - question),
            "num_tokens": constant(question),
        },
        "prompt_output": {"num_tokens": constant(output_tokens)},
    }
    path = folder / "workload.json"
    path.write_text(json.dumps(workload, indent=1) + "\n", encoding="utf-8")
    return path


def tenant(arm: str, repeat: int, length: int) -> str:
    """The API key of one run of the benchmark: its conversations' ids are the same in every run,
    and the router keeps those of different keys apart."""
    return f"{arm}-{repeat}-{length}"


def read_stats(path: Path, arm: str, repeat: int, length: int) -> list[Record]:
    """What the benchmark has written with --stats-json-output; BenchError if it is not that."""
    try:
        stats: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return _records(stats, arm, repeat, length)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BenchError(
            "statistics of the base release's benchmark cannot be read",
            file=path,
            expected="a list of requests with ttft_ms, latency_ms, …",
            found=f"{type(error).__name__}: {error}",
            next_step="see the benchmark's own output",
        ) from error


def _records(stats: Sequence[dict[str, Any]], arm: str, repeat: int, length: int) -> list[Record]:
    if not isinstance(stats, list) or not stats:
        raise ValueError("no requests")
    talks = {name: n for n, name in enumerate(sorted({str(s["conversation_id"]) for s in stats}))}
    return [
        Record(
            ttft_ms=float(one["ttft_ms"]),
            tpot_ms=float(one["tpot_ms"]),
            latency_ms=float(one["latency_ms"]),
            start_time_ms=float(one["start_time_ms"]),
            input_num_turns=int(one["input_num_turns"]),
            input_num_tokens=int(one["input_num_tokens"]),
            output_num_tokens=int(one["output_num_tokens"]),
            output_num_chunks=int(one["output_num_chunks"]),
            output_num_first_chunk_tokens=int(one["output_num_first_chunk_tokens"]),
            approx_cached_percent=float(one["approx_cached_percent"]),
            conversation_id=f"{tenant(arm, repeat, length)}/{one['conversation_id']}",
            client_id=int(one["client_id"]),
            request_id="",
            arm=arm,
            repeat=repeat,
            unit=f"base-{length}",
            talk=talks[str(one["conversation_id"])],
            turn=(int(one["input_num_turns"]) + 1) // 2,
            phase="base",
            held=0,
            mutation="",
            itl_ms=(),
            reply_digest="",
        )
        for one in stats
    ]
