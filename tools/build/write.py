"""Lay down the planned members as one wheel file, RECORD last."""

from __future__ import annotations

import calendar
import errno
import time
from collections.abc import Sequence
from pathlib import Path

from tools.build.archive import DosTime, WheelReader, WheelWriter
from tools.build.errors import ConfigError, OutputError
from tools.build.pins import Base, Label
from tools.build.plan import Member
from tools.build.record import Row, format_record, parse_record, row_of

# The zip format cannot say earlier or later.
_EARLIEST, _LATEST = (1980, 1, 1, 0, 0, 0), (2107, 12, 31, 23, 59, 58)


def timestamp(base: Base, reader: WheelReader, source_date_epoch: str | None) -> int:
    """Seconds since 1970 that our members carry.

    SOURCE_DATE_EPOCH if set (reproducible-builds.org), else the time in the base's METADATA
    entry, so that a build without it is reproducible too.
    """
    if source_date_epoch is None:
        when = reader.members[f"{base.dist_info}/METADATA"].date_time
        return calendar.timegm(when)
    if not source_date_epoch.isdecimal():
        raise ConfigError(
            "error: SOURCE_DATE_EPOCH is not a number of seconds",
            [("found", repr(source_date_epoch))],
            "unset it, or set it to e.g. `git log -1 --format=%ct`",
        )
    return int(source_date_epoch)


def write_wheel(
    path: Path,
    base: Base,
    label: Label,
    reader: WheelReader,
    members: Sequence[Member],
    epoch: int,
) -> None:
    """Write the wheel to `path`, which must not exist; OutputError if that cannot be done."""
    when = _dos_time(epoch)
    known = {row.path: row for row in parse_record(reader.read(f"{base.dist_info}/RECORD") or b"")}
    rows: list[Row] = []
    try:
        with path.open("xb") as stream:
            writer = WheelWriter(stream)
            for member in members:
                if member.data is None:
                    assert member.source is not None  # only members of the base have no data
                    writer.copy(reader, member.source, member.path)
                    row = known.get(member.source)
                    if row is None:
                        raise ConfigError(f"error: RECORD of {base.file} lacks {member.source}")
                    rows.append(Row(member.path, row.hash, row.size))
                else:
                    mode = (
                        reader.members[member.source].external_attr >> 16 & 0o777
                        if (member.source)
                        else 0o644
                    )
                    writer.store(member.path, member.data, when, mode)
                    rows.append(row_of(member.path, member.data))
            record = f"{label.dist_info}/RECORD"
            rows.append(Row(record, "", ""))
            writer.store(record, format_record(rows), when)
            writer.close()
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise OutputError(
            f"error: cannot write {path.name} to {path.parent.parent}: {what}",
            next_step="free space or choose another folder with --out; nothing was left behind",
        ) from error


def _dos_time(epoch: int) -> DosTime:
    moment = time.gmtime(epoch)
    when = (
        moment.tm_year,
        moment.tm_mon,
        moment.tm_mday,
        moment.tm_hour,
        moment.tm_min,
        moment.tm_sec,
    )
    return min(max(when, _EARLIEST), _LATEST)
