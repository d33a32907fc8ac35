"""Check who may import whom: the layers of this repository stay apart.

checks the following, by reading each file's syntax (imports inside functions and under
TYPE_CHECKING count, and so do literal arguments of import_module):

- tools/ imports nothing of the overlay's package `vllm.bidir`;
- the overlay imports nothing of tools/;
- the router imports no torch and nothing of the engine, so that it runs without either;
- what is loaded together with the router, `vllm.bidir` itself and `vllm.bidir.protocol`,
  keeps the router's rule;
- the connector imports nothing of the router.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_OURS = "vllm.bidir"
_ROUTER = "vllm.bidir.router"
# What the router may share with the rest of the overlay: it loads wherever the router does.
_SHARED = ("vllm.bidir.protocol", "vllm.bidir.reasons")
_CONNECTOR = "vllm.bidir.connector"
_HEAVY = ("torch", "torchaudio", "torchvision")


@dataclass(frozen=True)
class Imported:
    """One imported dotted name (`from a.b import c` gives a.b.c) and its line."""

    name: str
    line: int


def check_imports(root: Path) -> list[str]:
    """One `file:line: rule` line per violation below `root`, the repository's root."""
    problems: list[str] = []
    for folder, base in (("tools", root), ("overlay/vllm", root / "overlay")):
        for path in sorted((root / folder).rglob("*.py")):
            shown = path.relative_to(root).as_posix()
            module, is_package = _module(path.relative_to(base))
            try:
                tree = ast.parse(path.read_bytes(), shown)
            except SyntaxError as error:
                problems.append(f"{shown}:{error.lineno}: not valid Python: {error.msg}")
                continue
            for imported in imports(tree, module, is_package):
                rule = broken_rule(module, imported.name)
                if rule:
                    problems.append(f"{shown}:{imported.line}: {rule} (imports {imported.name})")
    return problems


def broken_rule(module: str, name: str) -> str:
    """The rule that `module` breaks by importing `name`, or an empty string."""
    if _within(module, "tools"):
        is_overlay = _within(name, _OURS) or _within(name, "overlay")
        return "tools must not import the overlay" if is_overlay else ""
    if not _within(module, _OURS):
        return ""
    if _within(name, "tools"):
        return "the overlay must not import tools"
    if _within(module, _CONNECTOR) and _within(name, _ROUTER):
        return "the connector must not import the router"
    light = {_ROUTER: "the router"} | dict.fromkeys(_SHARED, "what the router shares")
    who = next((text for place, text in light.items() if _within(module, place)), "")
    if module == _OURS:
        who = "what is loaded with the router"
    if not who:
        return ""
    if any(_within(name, heavy) for heavy in _HEAVY):
        return f"{who} must not import torch"
    if _within(name, "vllm") and not _within(name, _OURS):
        return f"{who} must not import the engine"
    allowed = (*_SHARED, _ROUTER) if _within(module, _ROUTER) else _SHARED
    if _within(name, _OURS) and not any(_within(name, place) for place in allowed):
        return f"{who} must not import other parts of {_OURS}"
    return ""


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[Imported]:
    """All names that a module imports, wherever the import stands, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Imported(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            source = _resolved(node.module or "", node.level, module, is_package)
            for alias in node.names:
                name = source if alias.name == "*" else f"{source}.{alias.name}"
                yield Imported(name, node.lineno)
        elif isinstance(node, ast.Call):
            yield from _called(node, module, is_package)


def _called(node: ast.Call, module: str, is_package: bool) -> Iterator[Imported]:
    function = node.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if called not in ("import_module", "__import__") or not node.args:
        return
    first = node.args[0]
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        level = len(first.value) - len(first.value.lstrip("."))
        name = _resolved(first.value.lstrip("."), level, module, is_package)
        yield Imported(name, node.lineno)


def _resolved(name: str, level: int, module: str, is_package: bool) -> str:
    if not level:
        return name
    parts = module.split(".")
    up = level - 1 if is_package else level
    kept = parts[: len(parts) - up]
    return ".".join((*kept, name) if name else kept)


def _module(path: Path) -> tuple[str, bool]:
    parts = path.with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")
