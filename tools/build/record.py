"""RECORD: the list of a wheel's members with hash and size (PEP 376, PEP 427)."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass

from tools.build.hashing import record_hash


@dataclass(frozen=True)
class Row:
    """One line of RECORD; `hash` and `size` are empty for RECORD itself."""

    path: str
    hash: str
    size: str


def row_of(path: str, data: bytes) -> Row:
    return Row(path, record_hash(hashlib.sha256(data).digest()), str(len(data)))


def parse_record(data: bytes) -> list[Row]:
    """Rows in file order; ValueError names a line that has not three fields."""
    rows: list[Row] = []
    for number, fields in enumerate(csv.reader(io.StringIO(data.decode("utf-8"))), 1):
        if len(fields) != 3:
            raise ValueError(f"RECORD line {number} has {len(fields)} fields instead of 3")
        rows.append(Row(*fields))
    return rows


def format_record(rows: Iterable[Row]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows((row.path, row.hash, row.size) for row in rows)
    return out.getvalue().encode("utf-8")
