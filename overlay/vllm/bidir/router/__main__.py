# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm.bidir.router`; the script `vllm-bidir-router` starts faster."""

import sys

from vllm.bidir.router.cli import main

sys.exit(main())
