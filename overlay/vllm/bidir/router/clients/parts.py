# SPDX-License-Identifier: Apache-2.0
"""Others' JSON, one level deep: its fields or items stay bytes, and there is an end to them.

A megabyte can hold a million of them, each an object of fifty bytes and more. What is longer than a
few pages is therefore read by decoders that stop at the first one too many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

# An API has some hundred fields, and a long conversation of an agent some thousand messages.
MOST_FIELDS = 1_000
MOST_ITEMS = 10_000
# Below, even the most parts take no longer than the rest of a request does.
SHORT = 16 << 10

Fields = dict[str, msgspec.Raw]


class TooManyError(Exception):
    """There are more parts than are looked at."""


class _Name(str):
    """A field's name, which goes through the decoder's hook."""


def _at_most(items: int) -> msgspec.json.Decoder[Any]:
    """Of a list's items. A list itself would be made as long as it is, and measured then."""
    names = [(f"item{number}", msgspec.Raw, msgspec.UNSET) for number in range(items)]
    return msgspec.json.Decoder(
        msgspec.defstruct("_Items", names, array_like=True, forbid_unknown_fields=True)
    )


# Places that stay empty take their time, too, and nearly all conversations are short enough for the
# first.
_ITEMS = (_at_most(1_000), _at_most(MOST_ITEMS))
_FIELDS = msgspec.json.Decoder(Fields)
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def split_object(text: bytes | msgspec.Raw) -> Fields:
    """An object's fields. TooManyError above MOST_FIELDS, msgspec's errors for anything else."""
    if len(memoryview(text)) > SHORT:
        return _split_long_object(text)
    fields = _FIELDS.decode(text)
    if len(fields) > MOST_FIELDS:
        raise TooManyError
    return fields


def split_array(text: bytes | msgspec.Raw) -> list[msgspec.Raw]:
    """A list's items. TooManyError above MOST_ITEMS, msgspec's errors for anything else."""
    if len(memoryview(text)) <= SHORT:
        return _LIST.decode(text)
    for decoder in _ITEMS:
        try:
            items = msgspec.structs.astuple(decoder.decode(text))
        except msgspec.ValidationError:
            if bytes(text).lstrip()[:1] != b"[":
                raise
        else:
            end = items.index(msgspec.UNSET) if items[-1] is msgspec.UNSET else len(items)
            return list(items[:end])
    raise TooManyError


def _split_long_object(text: bytes | msgspec.Raw) -> Fields:
    left = MOST_FIELDS

    def count(kind: type, name: str) -> _Name:
        nonlocal left
        left -= 1
        if left < 0:
            raise TooManyError
        return _Name(name)

    decoder = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=count)
    fields: Mapping[_Name, msgspec.Raw] = decoder.decode(text)
    return {str(name): value for name, value in fields.items()}
