"""Check patches/ as a whole: the series, the headers, and what a patch may touch.

Every problem is collected, so one run shows all that has to be mended.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tools.build.apply import is_protected
from tools.build.errors import ConfigError
from tools.build.patch import (
    SEPARATOR,
    check_path,
    parse_headers,
    parse_patch,
    patch_files,
    read_series,
)

FOLDERS = ("backports", "fixes", "hooks")
HEADERS = ("Subject", "Why", "Why-not-overlay", "Forwarded", "Origin", "Drop-when", "Test")
FILL_IN = "FILL IN"
# Where packages come from is the reader's own choice (mirror, air gap); no patch may fix it.
_REGISTRY = re.compile(
    rb"\b(?:py(?:pi|thonhosted)|anaconda|npmjs|crates)\.(?:org|com|io)\b"
    rb"|\bdownload\.pytorch\.[a-z]+\b|\bwheels\.vllm\.[a-z]+\b"
)


def check_patches(patches_dir: Path, tests_root: Path) -> list[str]:
    """All problems of patches/, one line each; an empty list means that it is in order.

    A `Test` header holds `tests/<file>.py::<test>` entries apart by blanks; `tests_root` is the
    folder that `tests/` stands for.
    """
    try:
        names = read_series(patches_dir)
    except ConfigError as error:
        return [_line(error)]
    there = patch_files(patches_dir)
    problems = [
        f"patches/series lists {name}, which is not there" for name in names if name not in there
    ]
    problems += [
        f"patches/{name} is not listed in patches/series" for name in sorted(there - set(names))
    ]
    for name in (*(n for n in names if n in there), *sorted(there - set(names))):
        problems += _check_patch(name, (patches_dir / name).read_bytes(), tests_root)
    return problems


def check_test(entry: str, tests_root: Path) -> str:
    """What is wrong with `tests/<file>.py::[<class>::]<test>`, or an empty string."""
    path, *names = entry.split("[", 1)[0].split("::")
    try:
        check_path("Test", path)
    except ConfigError as error:
        return _line(error)
    folder, _, rest = path.partition("/")
    if folder != "tests" or not names:
        return f"{entry!r} does not have the form tests/<file>.py::<test>"
    file = tests_root / rest
    if not file.is_file():
        return f"{path} does not exist"
    try:
        body: list[ast.stmt] = ast.parse(file.read_bytes(), str(file)).body
    except SyntaxError as error:
        return f"{path} is not valid Python: {error.msg}, line {error.lineno}"
    for depth, name in enumerate(names, 1):
        last = depth == len(names)
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef) if last else (ast.ClassDef,)
        found = next((node for node in body if isinstance(node, kinds) and node.name == name), None)
        if found is None:
            return f"{path} has no {'test function' if last else 'class'} {name}"
        body = found.body
    return ""


def _check_patch(name: str, data: bytes, tests_root: Path) -> list[str]:
    where = f"patches/{name}"
    problems: list[str] = []
    folder, _, rest = name.partition("/")
    if folder not in FOLDERS or not rest:
        problems.append(f"{where} is not in one of {', '.join(f'{f}/' for f in FOLDERS)}")
    for host in sorted({match[0] for match in _REGISTRY.finditer(data)}):
        problems.append(f"{where} names the package registry {host.decode()}")
    head, separator, _ = data.partition(b"\n" + SEPARATOR)
    if separator:
        problems += _check_headers(name, head + b"\n", tests_root)
    try:
        patch = parse_patch(name, data)
    except ConfigError as error:
        # A header that cannot be read stops both parsers; say so once.
        return [*problems, *(line for line in [f"{where}: {_line(error)}"] if line not in problems)]
    return problems + [
        f"{where} touches {file.path}, which no patch may change"
        for file in patch.files
        if is_protected(file.path)
    ]


def _check_headers(name: str, head: bytes, tests_root: Path) -> list[str]:
    where = f"patches/{name}"
    try:
        headers = parse_headers(name, head)
    except UnicodeDecodeError as error:
        return [f"{where}: its headers are not UTF-8 ({error.reason})"]
    except ConfigError as error:
        return [f"{where}: {_line(error)}"]
    problems: list[str] = []
    for key in HEADERS:
        value = headers.get(key, "")
        if key not in headers:
            problems.append(f"{where} has no header {key}")
        elif not value:
            problems.append(f"{where}: header {key} is empty")
        elif FILL_IN in value:
            problems.append(f"{where}: header {key} still says {FILL_IN!r}")
        elif key == "Test":
            problems += [
                f"{where}: header Test: {wrong}"
                for entry in value.split()
                if (wrong := check_test(entry, tests_root))
            ]
    return problems


def _line(error: ConfigError) -> str:
    """A ConfigError on one line."""
    details = "; ".join(f"{word} {text}" for word, text in error.details)
    subject = error.subject.removeprefix("error: ")
    return f"{subject}: {details}" if details else subject
