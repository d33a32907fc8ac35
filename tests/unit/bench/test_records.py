"""The file of records."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bench.made import record
from tools.bench.errors import BenchError
from tools.bench.plan import Talk, Turn, Unit
from tools.bench.records import RecordFile, read_lines, read_records

# As the base release's benchmark writes them, in its order.
BASE_FIELDS = [
    "ttft_ms",
    "tpot_ms",
    "latency_ms",
    "start_time_ms",
    "input_num_turns",
    "input_num_tokens",
    "output_num_tokens",
    "output_num_chunks",
    "output_num_first_chunk_tokens",
    "approx_cached_percent",
    "conversation_id",
    "client_id",
]
UNIT = Unit("sweep-700", (Talk((Turn("sweep", 600, 4), Turn("sweep", 700, 4))),))


def test_a_record_has_the_base_releases_fields_first(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.jsonl")
    file.append([record()])
    ((_, line),) = read_lines(file.path)
    assert list(line)[: len(BASE_FIELDS)] == BASE_FIELDS


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.jsonl")
    made = [record(turn=1, itl_ms=(1.5, 2.5)), record(turn=2)]
    file.append(made)
    assert read_records(file.path) == made


def test_a_unit_that_lacks_a_request_is_dropped_whole(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.jsonl")
    file.append([record(turn=1), record(turn=2)])
    file.append([record(repeat=1, turn=1)])
    planned = [("on", 0, UNIT), ("on", 1, UNIT)]
    assert file.resume(planned) == {("on", 0, "sweep-700")}
    assert {one.repeat for one in read_records(file.path)} == {0}


def test_a_unit_that_was_measured_twice_is_dropped(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.jsonl")
    file.append([record(turn=1), record(turn=1)])
    assert file.resume([("on", 0, UNIT)]) == set()


@pytest.mark.parametrize(
    ("line", "expected"),
    [("{broken", "a JSON object"), ("[1]", "a JSON object"), ('{"ttft_ms": 1}', "the fields")],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, expected: str) -> None:
    file = RecordFile(tmp_path / "r.jsonl")
    file.append([record()])
    with file.path.open("a") as out:
        out.write(line + "\n")
    with pytest.raises(BenchError) as error:
        read_records(file.path)
    assert f"{file.path}:2" in str(error.value) and expected in str(error.value)


def test_missing_records_say_what_makes_them(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"tools\.bench run"):
        read_records(tmp_path / "r.jsonl")
