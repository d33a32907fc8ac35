"""The command as a process, with a program in the place of the engines."""

from __future__ import annotations

import os
import random
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from tests.unit.demo.conftest import FAKE_ENGINE
from tests.unit.demo.marked import Marked, start
from tools.bench.arguments import CPU, parser, workload_of
from tools.bench.commands import COMMANDS
from tools.bench.model import Shape, qwen3, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = Shape(qwen3(2, 64, 128, 2, vocab_size=500, dtype="float32"), dtype="float32")
    return write_model(tmp_path / "model", shape)


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """An engine that starts and never serves; asked for versions, it has none."""
    path = tmp_path / "fake-python"
    asked = 'if sys.argv[1] == "-c":\n    print("{}")\n    sys.exit()\n'
    text = FAKE_ENGINE.format(python=sys.executable)
    head, rest = text.split('print("fake', 1)
    path.write_text(f'{head}{asked}print("fake{rest}', encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def bench(*arguments: str | Path, env: dict[str, str] | None = None) -> Marked:
    return start(arguments, env, module="tools.bench")


def ended(marked: Marked) -> tuple[int, str, str]:
    out, err = marked.process.communicate(timeout=60)
    return marked.process.returncode, out, err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        parser().parse_args([command, "--help"])
    assert status.value.code == 0
    assert f"example:\n  python -m tools.bench {command} " in capsys.readouterr().out


def test_what_is_not_given_is_the_devices_own() -> None:
    args = parser().parse_args(["run", "--lengths", "600,700", "--hold", "0"])
    made = workload_of(args, CPU)
    assert (made.lengths, made.hold_conversations) == ((600, 700), 0)
    assert (made.new_tokens, made.turns) == (CPU.new_tokens, CPU.turns)


def test_a_trace_is_replayed_alone_unless_more_is_asked_for() -> None:
    args = parser().parse_args(["run", "--trace", "t.jsonl"])
    made = workload_of(args, CPU)
    assert (made.lengths, made.turns, made.hold_conversations) == ((), 0, 0)
    args = parser().parse_args(["run", "--trace", "t.jsonl", "--lengths", "600"])
    assert workload_of(args, CPU).lengths == (600,)


def test_ctrl_c_leaves_no_process_and_says_how_to_go_on(
    fake_python: Path, model: Path, tmp_path: Path
) -> None:
    marked = bench("run", "--out", tmp_path / "o", "--python", fake_python, "--model", model)
    assert marked.process.stderr is not None
    while "starting at" not in marked.process.stderr.readline():
        assert marked.process.poll() is None
    time.sleep(random.uniform(0, 0.3))
    marked.process.send_signal(signal.SIGINT)
    status, _, err = ended(marked)
    assert status == 130, err
    assert "the same command goes on" in err and "Traceback" not in err
    assert marked.running() == []


def test_an_engine_that_dies_is_one_message_with_its_log(
    fake_python: Path, model: Path, tmp_path: Path
) -> None:
    marked = bench(
        *("run", "--out", tmp_path / "o", "--python", fake_python, "--model", model),
        env={"FAKE_ENGINE": "die"},
    )
    status, out, err = ended(marked)
    assert (status, out) == (1, "")
    assert "error: " in err and "Traceback" not in err and "ValueError: the reason" in err
    assert marked.running() == []


@pytest.mark.parametrize(("gpus", "model"), [(1, "qwen3-8b"), (2, "qwen3-32b")])
def test_with_gpus_the_largest_shape_that_fits_is_served_on_them(
    fake_python: Path, tmp_path: Path, gpus: int, model: str
) -> None:
    """Without any argument; on one GPU of 140 GiB the two engines share it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    smi.write_text(
        f"""#!/bin/sh
for gpu in $(seq {gpus}); do
    case $1 in -L) echo "GPU $gpu: NVIDIA H200" ;; *) echo "NVIDIA H200, 143771, 580.1" ;; esac
done
"""
    )
    smi.chmod(0o755)
    marked = bench(
        *("run", "--out", tmp_path / "o", "--python", fake_python),
        env={"PATH": f"{tools}:{os.environ['PATH']}", "FAKE_ENGINE": "die"},
    )
    status, _, err = ended(marked)
    assert status == 1
    assert f"/{model} --served-model-name" in err and "--load-format dummy" in err
    assert "--no-enable-prefix-caching" in err and "--enforce-eager" not in err
    assert "--max-model-len 24624" in err
    assert ("--gpu-memory-utilization" in err) is (gpus == 1)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["run", "--lengths", "a"], 2, "expected numbers with commas, found 'a'"),
        (["run", "--arms", "off,of", "--model", "MODEL"], 1, "arm 'of' does not exist"),
        (["run", "--arms", "on,on", "--model", "MODEL"], 1, "arm 'on' comes twice"),
        (["run", "--lengths", "100", "--model", "MODEL"], 1, "lengths of at least 145"),
        (["run", "--max-model-len", "600", "--model", "MODEL"], 1, "--max-model-len of at least"),
        (["run", "--model", "nowhere"], 1, "there is no model 'nowhere'"),
        (["run", "--repeats", "0", "--model", "MODEL"], 1, "--repeats of 1 or more"),
        (["run", "--trace", "nowhere", "--model", "MODEL"], 1, "a trace cannot be read"),
        (["report", "nowhere"], 1, "records cannot be read"),
        (["drive", "--arm", "on"], 1, "--model"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(
    model: Path, tmp_path: Path, arguments: list[str], status: int, said: str
) -> None:
    given = [str(model) if word == "MODEL" else word for word in arguments]
    if arguments[0] != "report":
        given += ["--out", str(tmp_path / "o")]
    found, out, err = ended(bench(*given))
    assert (found, out) == (status, ""), err
    assert said in err and "Traceback" not in err
    assert not (tmp_path / "o" / "runs").exists()
