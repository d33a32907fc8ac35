"""What an object keeps alive, and how many bytes that is."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec

# Shared with everybody, or leading there.
_CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)


@dataclass
class Sizes:
    """Objects by the name of their type, and all their bytes as Python hands them out."""

    objects: Counter[str] = field(default_factory=Counter)
    bytes: int = 0


def sizes_of(*roots: Any) -> Sizes:
    """Everything that can be reached from `roots`, each object once."""
    found, seen, stack = Sizes(), set(), list(roots)
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, _CODE):
            continue
        seen.add(id(one))
        found.objects[type(one).__name__] += 1
        found.bytes += -(-sys.getsizeof(one) // 16) * 16
        if isinstance(one, msgspec.Struct):
            # Those that the garbage collector leaves alone, it does not look into either.
            stack.extend(getattr(one, name) for name in one.__struct_fields__)
        else:
            stack.extend(gc.get_referents(one))
    return found
