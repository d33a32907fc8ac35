"""Read a base wheel and write a new one, copying untouched members as compressed bytes.

Recompressing 700 MB would cost a minute and give other bytes on another zlib; copying raw
costs neither. Members that we rewrite or add are stored uncompressed for the same reason:
their bytes depend on nothing but their content.

Formats: PKWARE APPNOTE 6.3 (zip), PEP 427 (wheel). Zip64 is refused: no wheel index takes
files that large.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from tools.build.errors import FetchError, OutputError
from tools.build.hashing import CHUNK

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s4B4H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_UNIX = 3
_VERSION = 20
_UTF8 = 0x800
_DATA_DESCRIPTOR = 0x8
_ENCRYPTED = 0x1
_LIMIT = 0xFFFFFFFF

DosTime = tuple[int, int, int, int, int, int]


class WheelReader:
    """A wheel that is open for reading; also gives each member's bytes as they lie in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise FetchError(
                f"error: {path} is not a readable wheel",
                [("found", str(error))],
                "delete it and run again, or give another file with UPSTREAM_WHEEL=path",
            ) from error
        self._stream = path.open("rb")
        self.members: dict[str, zipfile.ZipInfo] = {
            info.filename: info for info in self._zip.infolist()
        }
        self.repeated = len(self._zip.infolist()) - len(self.members)

    def __enter__(self) -> WheelReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._zip.close()
        self._stream.close()

    def read(self, name: str) -> bytes | None:
        """Content of a member, or None when there is no such member."""
        info = self.members.get(name)
        return None if info is None else self._zip.read(info)

    def pieces(self, name: str) -> Iterator[bytes]:
        """Content of a member in pieces; zipfile checks its CRC and its local header."""
        with self._zip.open(self.members[name]) as stream:
            while piece := stream.read(CHUNK):
                yield piece

    def raw(self, name: str) -> Iterator[bytes]:
        """A member's compressed bytes, in pieces."""
        info = self.members[name]
        self._stream.seek(info.header_offset)
        header = _LOCAL.unpack(self._stream.read(_LOCAL.size))
        self._stream.seek(header[9] + header[10], 1)
        left = info.compress_size
        while left:
            piece = self._stream.read(min(CHUNK, left))
            if not piece:
                raise FetchError(f"error: {self.path} ends inside {name}")
            left -= len(piece)
            yield piece


@dataclass(frozen=True)
class _Entry:
    name: bytes
    flags: int
    method: int
    when: DosTime
    crc: int
    packed: int
    size: int
    attributes: int
    offset: int


class WheelWriter:
    """Write a wheel member by member; `close` writes the central directory."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._entries: list[_Entry] = []
        self._names: set[bytes] = set()
        self._offset = 0

    def copy(self, source: WheelReader, name: str, to: str) -> None:
        """Take over a member of `source` as it is, under the name `to`."""
        info = source.members[name]
        if info.flag_bits & _ENCRYPTED:
            raise FetchError(f"error: {source.path}: member {name} is encrypted")
        # Sizes are known, so a data descriptor behind the member would only repeat them.
        flags = info.flag_bits & ~(_DATA_DESCRIPTOR | _UTF8)
        self._begin(
            to,
            flags,
            info.compress_type,
            info.date_time,
            info.CRC,
            info.compress_size,
            info.file_size,
            info.external_attr,
        )
        for piece in source.raw(name):
            self._put(piece)

    def store(self, name: str, data: bytes, when: DosTime, mode: int = 0o644) -> None:
        """Write a member of ours, uncompressed, as a regular file."""
        attributes = (0o100000 | mode) << 16
        self._begin(
            name, 0, zipfile.ZIP_STORED, when, zlib.crc32(data), len(data), len(data), attributes
        )
        self._put(data)

    def close(self) -> None:
        """Write the central directory and the end record."""
        start = self._offset
        for entry in self._entries:
            self._put(
                _CENTRAL.pack(
                    b"PK\x01\x02",
                    _VERSION,
                    _UNIX,
                    _VERSION,
                    0,
                    entry.flags,
                    entry.method,
                    *_dos(entry.when),
                    entry.crc,
                    entry.packed,
                    entry.size,
                    len(entry.name),
                    0,
                    0,
                    0,
                    0,
                    entry.attributes,
                    entry.offset,
                )
                + entry.name
            )
        count, size = len(self._entries), self._offset - start
        if count > 0xFFFF or self._offset > _LIMIT:
            raise OutputError(
                "error: the wheel would need zip64",
                [("found", f"{count} members, {self._offset} bytes")],
                "leave something out of the overlay",
            )
        self._put(_END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0))

    def _begin(
        self,
        name: str,
        flags: int,
        method: int,
        when: DosTime,
        crc: int,
        packed: int,
        size: int,
        attributes: int,
    ) -> None:
        encoded = name.encode("utf-8")
        if not name.isascii():
            flags |= _UTF8
        if encoded in self._names:
            raise OutputError(f"error: two members of the wheel would be called {name}")
        if max(packed, size, self._offset) > _LIMIT:
            raise OutputError(f"error: {name} would need zip64 ({size} bytes)")
        self._names.add(encoded)
        entry = _Entry(encoded, flags, method, when, crc, packed, size, attributes, self._offset)
        self._entries.append(entry)
        self._put(
            _LOCAL.pack(
                b"PK\x03\x04",
                _VERSION,
                flags,
                method,
                *_dos(when),
                crc,
                packed,
                size,
                len(encoded),
                0,
            )
            + encoded
        )

    def _put(self, data: bytes) -> None:
        self._stream.write(data)
        self._offset += len(data)


def _dos(when: DosTime) -> tuple[int, int]:
    """Time and date words of MS-DOS, whose clock starts in 1980 and ticks every two seconds."""
    year, month, day, hour, minute, second = when
    return hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day
