# SPDX-License-Identifier: Apache-2.0
"""Start the router without starting vLLM.

`import vllm` loads torch: seconds and some 400 MB for a process that moves bytes. The router
needs nothing of it, so the console script enters here and gives `vllm` its place in sys.modules
as a bare namespace: `vllm.bidir.router` then imports, and `vllm/__init__.py` never runs.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from types import ModuleType


def main() -> int:
    """Run the router's command line; see `vllm-bidir-router --help`."""
    if "vllm" not in sys.modules:
        spec = PathFinder.find_spec("vllm")
        if spec is None or spec.submodule_search_locations is None:
            raise SystemExit("error: no vllm package beside vllm_bidir_router; reinstall the wheel")
        package = ModuleType("vllm")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["vllm"] = package

    from vllm.bidir.router.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
