"""The layers of the repository stay apart, and a violation is named with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.build.import_rules import check_imports

TOOL = "tools/bench/run.py"
ROUTER = "overlay/vllm/bidir/router/app.py"
CONNECTOR = "overlay/vllm/bidir/connector/core.py"
SERVER = "overlay/vllm/bidir/server/hook.py"
SHARED = "overlay/vllm/bidir/protocol.py"
PACKAGE = "overlay/vllm/bidir/__init__.py"
ROUTER_PACKAGE = "overlay/vllm/bidir/router/__init__.py"


def problems(root: Path, file: str, source: str) -> list[str]:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return check_imports(root)


@pytest.mark.parametrize(
    ("file", "source", "rule"),
    [
        (TOOL, "import vllm.bidir", "tools must not import the overlay"),
        (TOOL, "from vllm import bidir", "tools must not import the overlay"),
        (TOOL, "from vllm.bidir.router.app import main", "tools must not import the overlay"),
        (TOOL, "import overlay.vllm", "tools must not import the overlay"),
        (TOOL, "import_module('vllm.bidir.router')", "tools must not import the overlay"),
        (SERVER, "from tools.build import pins", "the overlay must not import tools"),
        (PACKAGE, "import tools", "the overlay must not import tools"),
        (CONNECTOR, "from vllm.bidir.router import app", "connector must not import the router"),
        (CONNECTOR, "from ..router.app import main", "connector must not import the router"),
        (CONNECTOR, "from .. import router", "connector must not import the router"),
        (ROUTER, "import torch", "the router must not import torch"),
        (ROUTER, "from torch.nn import functional", "the router must not import torch"),
        (ROUTER, "import vllm", "the router must not import the engine"),
        (ROUTER, "from vllm import SamplingParams", "the router must not import the engine"),
        (ROUTER, "import vllm.config as c", "the router must not import the engine"),
        (ROUTER, "from ...config import VllmConfig", "the router must not import the engine"),
        (ROUTER, "from ..connector import core", "must not import other parts of vllm.bidir"),
        (ROUTER, "from vllm.bidir import *", "must not import other parts of vllm.bidir"),
        (ROUTER_PACKAGE, "from ..server import hook", "must not import other parts"),
        (SHARED, "import torch", "what the router shares must not import torch"),
        (SHARED, "from .connector import core", "what the router shares must not import other"),
        (PACKAGE, "import torch", "what is loaded with the router must not import torch"),
        (PACKAGE, "from .connector import core", "loaded with the router must not import other"),
    ],
)
def test_an_import_across_layers_is_one_problem(
    tmp_path: Path, file: str, source: str, rule: str
) -> None:
    (problem,) = problems(tmp_path, file, f"'''One.'''\n{source}\n")
    assert problem.startswith(f"{file}:2: ") and rule in problem


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (TOOL, "import vllm\nfrom tools.build import pins\nfrom vllm.bidirectional import x"),
        (ROUTER, "import json\nfrom . import policy\nfrom .policy import pick"),
        (ROUTER, "from vllm.bidir.router import policy\nfrom vllm.bidir.protocol import Lease"),
        (ROUTER, "from ..protocol import Lease\nimport torchlike"),
        (ROUTER_PACKAGE, "from . import app\nfrom .app import main"),
        (CONNECTOR, "import torch\nfrom vllm.config import VllmConfig\nfrom . import lease"),
        (SERVER, "from ..connector import core\nfrom ..router import app"),
        (PACKAGE, "from .protocol import Lease"),
        (ROUTER, "import_module(name)"),
    ],
)
def test_imports_within_the_rules_are_no_problem(tmp_path: Path, file: str, source: str) -> None:
    assert problems(tmp_path, file, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import torch\n",
        "if TYPE_CHECKING:\n    import torch\n",
        "try:\n    import torch\nexcept ImportError:\n    torch = None\n",
        "import json, torch\n",
    ],
)
def test_an_import_counts_wherever_it_stands(tmp_path: Path, source: str) -> None:
    (problem,) = problems(tmp_path, ROUTER, source)
    assert "the router must not import torch" in problem


def test_every_violation_is_listed(tmp_path: Path) -> None:
    found = problems(tmp_path, ROUTER, "import torch\nimport tools\nfrom vllm import a, b\n")
    assert [problem.split(":")[1] for problem in found] == ["1", "2", "3", "3"]


def test_a_file_that_does_not_parse_is_a_problem(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, TOOL, "def (:\n")
    assert problem.startswith(f"{TOOL}:1: not valid Python")


def test_this_repository_keeps_its_rules() -> None:
    assert check_imports(Path(__file__).resolve().parents[3]) == []
