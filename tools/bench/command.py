"""How each benchmark's command ends: its exit status, and one line about what went wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tools.bench.errors import BenchError
from tools.build.errors import BuildError
from tools.cluster import ClusterError
from tools.demo.interrupts import Interrupts, end_children

MET, NOT_MET, NOT_MEASURED, INTERRUPTED = 0, 1, 2, 130
EXIT_STATUS = f"""Exit status: {MET} all that is required was found, {NOT_MET} it was not,
{NOT_MEASURED} it could not be measured (an argument, a file, a request, an engine),
{INTERRUPTED} interrupted."""


def ended(work: Callable[[], int], interrupted: str) -> int:
    """Do the work, whose result is MET or NOT_MET, and return the exit status.

    `interrupted` says what a first Ctrl-C leaves behind. No child outlives the command.
    """
    with Interrupts() as interrupts:
        try:
            return work()
        except (BenchError, BuildError, ClusterError) as error:
            text = str(error)
            print(text if text.startswith("error: ") else f"error: {text}", file=sys.stderr)
            return NOT_MEASURED
        except KeyboardInterrupt:
            interrupts.hold()
            print(f"\ninterrupted; {interrupted}", file=sys.stderr)
            return INTERRUPTED
        finally:
            end_children()
