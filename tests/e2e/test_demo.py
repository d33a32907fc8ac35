"""`make demo` from the outside: what it shows, and that it can be stopped at any time."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

from tests.unit.demo.marked import start
from tools.demo.conversation import ANSWER_TOKENS

_RUN_S = 600
_STOP_S = 60
# The engines start within this; the stops before and after it are in the unit tests.
_LATEST_S = 20.0

_CELL = r"([\d ]*\d(?:\.\d)?|\u2013|-)(?: ms)?"
_ROW = re.compile(r" +(\d)" + rf"  +{_CELL}" * 6 + r"  (hit|miss \(first turn\))")


def test_shows_what_was_read_back_and_that_the_text_is_the_same(tmp_path: Path) -> None:
    """A turn is read back up to what D kept, the rest is computed, and the text stays the same."""
    demo = start(["--turns", "2", "--logs", tmp_path])
    out, err = demo.process.communicate(timeout=_RUN_S)
    assert demo.process.returncode == 0, out + err
    assert err == ""
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100
    assert "same text in both runs: yes" in out
    head = next(line for line in out.splitlines() if line.startswith("turn "))
    assert head.split("  ")[0] == "turn" and head.endswith("was")
    first, second = [row.groups() for line in out.splitlines() if (row := _ROW.fullmatch(line))]

    _, prompt, read, computed, prefill, transfer, _, was = first
    assert (number(read), transfer, was) == (0, read, "miss (first turn)")
    assert number(computed) == number(prompt)
    assert number(prefill) > 0
    kept = number(prompt) + ANSWER_TOKENS - 1

    _, prompt, read, computed, prefill, transfer, ttft, was = second
    assert was == "hit"
    # All that the first turn left on D, whose last token was never fed back into the model.
    assert number(read) == kept
    assert number(computed) == number(prompt) - kept
    assert 0 < number(transfer) < number(prefill) < number(ttft)

    assert re.search(r"^feature off: prefill \d.* / \d.* ms$", out, flags=re.MULTILINE)
    assert {"prefill-0.log", "decode-0.log", "router.log"} <= {p.name for p in tmp_path.iterdir()}
    assert demo.running() == []


def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    """At a random moment, real engines and all that they have started are ended."""
    moment = random.uniform(0, _LATEST_S)
    demo = start(["--turns", "2", "--logs", tmp_path])
    assert demo.process.stdout is not None
    demo.process.stdout.readline()
    time.sleep(moment)
    demo.process.send_signal(signal.SIGINT)
    out, err = demo.process.communicate(timeout=_STOP_S)
    shown = f"SIGINT after {moment:.2f} s\n{out}\n{err}"
    assert demo.process.returncode == 130, shown
    assert out.splitlines()[-1].startswith("Stopped:"), shown
    assert err == "", shown
    assert demo.running() == [], shown


def number(cell: str) -> float:
    """A cell's number; 0 where there was nothing to measure."""
    return 0.0 if cell in "-\u2013" else float(cell.replace(" ", ""))
