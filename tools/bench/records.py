"""One record per request, one line per record, whole units only.

The first fields have the names and the meaning that the base release's multi-turn benchmark gives
them in its own statistics; the others are ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tools.bench.errors import BenchError
from tools.bench.plan import Unit

Key = tuple[str, int, str, int, int]


@dataclass(frozen=True)
class Record:
    """One request as its client saw it. Times in ms.

    ttft_ms: until the first chunk with a token. tpot_ms: per token after that chunk.
    start_time_ms: on a clock that only differences can be taken of. input_num_turns: messages.
    approx_cached_percent: share of the prompt that is history. client_id: always 0, since one
    process sends all requests.
    request_id: what the router and the engines call it too; "" if its client gave it none.
    talk: number of the conversation within its unit. itl_ms: between chunks, for streams that are
    measured for it. reply_digest: equal for equal replies.
    """

    ttft_ms: float
    tpot_ms: float
    latency_ms: float
    start_time_ms: float
    input_num_turns: int
    input_num_tokens: int
    output_num_tokens: int
    output_num_chunks: int
    output_num_first_chunk_tokens: int
    approx_cached_percent: float
    conversation_id: str
    client_id: int
    request_id: str
    arm: str
    repeat: int
    unit: str
    talk: int
    turn: int
    phase: str
    held: int
    mutation: str
    itl_ms: tuple[float, ...]
    reply_digest: str

    @property
    def key(self) -> Key:
        """What this is a record of, whenever it was made."""
        return self.arm, self.repeat, self.unit, self.talk, self.turn


_FIELDS = {field.name for field in fields(Record)}


class RecordFile:
    """A JSONL file that a run appends to, unit by unit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, records: Sequence[Record]) -> None:
        """Write a unit's records; they are on the disk when this returns."""
        lines = "".join(to_line(asdict(record)) for record in records)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def resume(self, planned: Iterable[tuple[str, int, Unit]]) -> set[tuple[str, int, str]]:
        """Drop what an interruption has torn; return (arm, repeat, unit) of what is there whole.

        BenchError if there are records of anything that is not planned.
        """
        if not self.path.exists():
            return set()
        counts = {(arm, repeat, unit.name): unit.requests for arm, repeat, unit in planned}
        found: dict[tuple[str, int, str], list[Record]] = {}
        for record in read_records(self.path, torn_end=True):
            found.setdefault((record.arm, record.repeat, record.unit), []).append(record)
        strangers = sorted(found.keys() - counts.keys())
        if strangers:
            raise BenchError(
                "the records are of another plan",
                file=self.path,
                expected=f"units such as {next(iter(counts), None)}",
                found=strangers[0],
                next_step="choose another folder (--out), or begin anew (--fresh)",
            )
        whole = {
            name: records
            for name, records in found.items()
            if len({record.key for record in records}) == len(records) == counts[name]
        }
        lines = [to_line(asdict(r)) for records in whole.values() for r in records]
        write_whole(self.path, "".join(lines))
        return set(whole)


def read_records(path: Path, torn_end: bool = False) -> list[Record]:
    """All records of a file; BenchError, naming the line, for one that is none.

    With `torn_end` a last line without its end is left out: it was being written.
    """
    return [_record(path, number, line) for number, line in read_lines(path, torn_end)]


def read_lines(path: Path, torn_end: bool = False) -> list[tuple[int, dict[str, Any]]]:
    """(number, object) of each line of a JSONL file; BenchError for a line that is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(
            "records cannot be read",
            file=path,
            found=error,
            next_step="run the arms first: python -m tools.bench run",
        ) from error
    lines = text.split("\n")
    if torn_end:
        lines[-1] = ""
    found = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise _broken(path, number, "a JSON object", f"{error}") from error
        if not isinstance(value, dict):
            raise _broken(path, number, "a JSON object", type(value).__name__)
        found.append((number, value))
    return found


def to_line(value: dict[str, Any]) -> str:
    """One line of a JSONL file, with its end."""
    return json.dumps(value, separators=(",", ":")) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is either the old one or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _record(path: Path, number: int, value: dict[str, Any]) -> Record:
    missing = sorted(_FIELDS - value.keys())
    if missing:
        raise _broken(path, number, f"the fields {', '.join(missing)}", "a line without them")
    known = {name: value[name] for name in _FIELDS}
    return Record(**{**known, "itl_ms": tuple(known["itl_ms"])})


def _broken(path: Path, number: int, expected: str, found: str) -> BenchError:
    return BenchError(
        "a line is not a record",
        file=f"{path}:{number}",
        expected=expected,
        found=found,
        next_step="delete the line, and its unit is run again",
    )
