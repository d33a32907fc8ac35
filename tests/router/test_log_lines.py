"""Log lines come in order, those of one round of the loop in one write, and none is lost."""

from __future__ import annotations

import asyncio
import io
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.bidir.router.telemetry.log_lines import Lines, LogLines, TurnLog, _Said

# What is to be written has been by then.
LONG_S = 0.5
OVERLAY = Path(__file__).resolve().parents[2] / "overlay"


class Writes(io.StringIO):
    """Remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def write(self, text: str) -> int:
        self.seen.append(text)
        return super().write(text)


@pytest.fixture
def writes() -> Writes:
    return Writes()


@pytest.fixture
def logger(writes: Writes) -> Iterator[logging.Logger]:
    made = logging.Logger("lines", logging.INFO)
    handler = LogLines(writes)
    made.addHandler(handler)
    yield made
    handler.close()


async def test_the_lines_of_a_while_are_written_behind_it_at_once(
    logger: logging.Logger, writes: Writes
) -> None:
    said = ["one"]
    logger.info("%s", said)
    await asyncio.sleep(0)
    said.append("two")
    logger.info("%s", said)
    assert writes.seen == []
    await asyncio.sleep(LONG_S)
    assert writes.seen == ["['one']\n['one', 'two']\n"]
    logger.info("later")
    await asyncio.sleep(LONG_S)
    assert writes.seen[1:] == ["later\n"]


def test_each_line_has_its_own_time() -> None:
    form = "%(asctime)s %(message)s", "%m-%d %H:%M:%S"
    ours, loggings = Lines(*form), logging.Formatter(*form)
    record = logging.makeLogRecord({"msg": "said"})
    for created in (0.1, 0.9, 1.0, 86_400.0, 0.5, 1_800_000_000.25, 1_800_000_001.0):
        record.created = created
        assert ours.format(record) == loggings.format(record)


async def test_a_warning_is_written_at_once_and_overtakes_nothing(
    logger: logging.Logger, writes: Writes
) -> None:
    logger.info("before")
    logger.warning("now")
    assert "".join(writes.seen) == "before\nnow\n"
    await asyncio.sleep(LONG_S)
    assert "".join(writes.seen) == "before\nnow\n"


def test_without_a_loop_each_line_is_written_at_once(
    logger: logging.Logger, writes: Writes
) -> None:
    logger.info("one")
    assert writes.seen == ["one\n"]


async def test_a_line_that_cannot_be_made_takes_no_other_with_it(
    logger: logging.Logger, writes: Writes, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.info("before")
    logger.info("%d", "no number")
    logger.info("behind")
    await asyncio.sleep(LONG_S)
    assert writes.getvalue() == "before\nbehind\n"
    assert "no number" in capsys.readouterr().err  # logging's own word about it


@pytest.mark.parametrize("ours", [True, False])
async def test_what_a_turn_says_that_cannot_be_made_takes_no_other_with_it(
    ours: bool, logger: logging.Logger, writes: Writes, capsys: pytest.CaptureFixture[str]
) -> None:
    (lines,) = logger.handlers
    assert isinstance(lines, LogLines)
    if ours:
        lines.setFormatter(Lines("%(message)s", "%H"))
    for form, word in (("%s", "before"), ("%d", "no number"), ("%s", "behind")):
        lines.later(logger, form, word)
    await asyncio.sleep(LONG_S)
    assert writes.getvalue() == "before\nbehind\n"
    assert "no number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "args"), [("%s: %s", ("turn", "100%")), ("100%%", ()), ("said", ())]
)
def test_a_line_that_is_made_without_a_record_is_what_logging_makes_of_one(
    form: str, args: tuple[str, ...]
) -> None:
    lines = "%(levelname)s %(asctime)s [router] %(name)s %(message)s", "%m-%d %H:%M:%S"
    said = _Said(logging.getLogger("some.name"), 1_800_000_000.25, form, args)
    assert Lines(*lines).line(said) == logging.Formatter(*lines).format(said.record())


async def test_what_a_turn_says_is_a_line_like_any_other_and_in_its_place(
    logger: logging.Logger, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lines,) = logger.handlers
    assert isinstance(lines, LogLines)
    lines.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s %(message)s"))
    turns = TurnLog(logger)
    turns.info("%s", "at once")
    turns.through = lines
    logger.info("before")
    with monkeypatch.context() as changed:
        changed.setattr(time, "time", lambda: 0.25)
        turns.info("%s: %s", "turn", "100%")
    logger.info("behind")
    await asyncio.sleep(LONG_S)
    words = [line.split(" ", 3) for line in writes.getvalue().splitlines()]
    assert [rest for *_, rest in words] == [
        "lines at once",
        "lines before",
        "lines turn: 100%",
        "lines behind",
    ]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0)).split()
    assert words[2][:3] == ["INFO", at[0], f"{at[1]},250"]
    quiet = TurnLog(logging.Logger("quiet", logging.WARNING))
    quiet.through = lines
    quiet.info("nobody wants to know")
    await asyncio.sleep(LONG_S)
    assert len(writes.getvalue().splitlines()) == 4


def test_the_end_of_the_process_loses_no_line() -> None:
    ends = (
        "import asyncio, logging, sys\n"
        "from vllm.bidir.router.telemetry.log_lines import LogLines\n"
        "logging.basicConfig(handlers=[LogLines(sys.stderr)], level=logging.INFO)\n"
        "async def main():\n"
        "    logging.info('the last')\n"
        "    sys.exit(3)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", ends],
        env={"PYTHONPATH": str(OVERLAY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3 and "the last" in done.stderr
