"""The unit files: systemd takes them, and what they start gets whole arguments."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from vllm.bidir.router.options import parser

FOLDER = Path(__file__).resolve().parents[2] / "deploy/systemd"
UNITS = sorted(FOLDER.glob("*.service"))
BIN = "/opt/vllm-bidir/bin"


def environment(name: str) -> dict[str, str]:
    lines = (FOLDER / f"{name}.env").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {key: shlex.split(value)[0] if "'" in value else value for key, value in pairs}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_nothing_to_complain_of(unit: Path, tmp_path: Path) -> None:
    """Neither as it is nor with all credentials that it offers."""
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "vllm-bidir-router"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    text = unit.read_text(encoding="utf-8").replace(BIN, str(tmp_path / "bin"))
    for variant in {text, text.replace("#LoadCredential", "LoadCredential")}:
        _verify(unit, variant, tmp_path)


def _verify(unit: Path, text: str, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if unit.name in line]
    assert (done.returncode, ours) == (0, [])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_each_unit_has_the_file_that_it_reads(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8")
    (name,) = re.findall(r"EnvironmentFile=/etc/vllm-bidir/(\w+)\.env", text)
    used = set(re.findall(r"\$\{?(\w+)", text))
    assert used <= set(environment(name)) and unit.stem == f"vllm-bidir-{name}"


@pytest.mark.parametrize(
    ("name", "role", "port"),
    [("prefill", "kv_producer", "8100"), ("decode", "kv_consumer", "8200")],
)
def test_engines_are_told_their_role(name: str, role: str, port: str) -> None:
    given = environment(name)
    config = json.loads(given["KV_TRANSFER_CONFIG"])
    assert config["kv_connector"] == "NixlConnector" and config["kv_role"] == role
    assert config["kv_connector_extra_config"]["bidirectional_kv_xfer"] is True
    assert given["PORT"] == port
    words = environment("router")["ROUTER_ARGS"].split()
    flag = {"prefill": "--prefiller", "decode": "--decoder"}[name]
    assert words[words.index(f"{flag}-ports") + 1] == port
    assert words[words.index(f"{flag}-hosts") + 1] == given["VLLM_NIXL_SIDE_CHANNEL_HOST"]


def test_p_says_what_it_has_computed() -> None:
    """Else the router cannot tell a hit from a prompt that P has computed all the same."""
    assert "--enable-prompt-tokens-details" in environment("prefill")["ENGINE_ARGS"].split()


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_engines_let_finish_what_is_under_way_before_they_are_killed(name: str) -> None:
    """Without the option they abort it; what outlasts it hangs until the kill."""
    text = (FOLDER / f"vllm-bidir-{name}.service").read_text(encoding="utf-8")
    (flag,) = re.findall(r"^ExecStart=.* --shutdown-timeout (\d+) ", text, re.M)
    (killed,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.M)
    assert 40 <= int(killed) - 20 <= int(flag) <= int(killed) - 10
    # The API server ends the others in its own order.
    assert "\nKillMode=mixed\n" in text


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_spans_of_p_and_d_can_be_told_apart(name: str) -> None:
    assert environment(name)["OTEL_SERVICE_NAME"] == f"vllm-{name}"


def test_the_router_can_read_what_only_root_may() -> None:
    """Its user is made up when it starts; each credential is one that an option can be given."""
    unit = FOLDER / "vllm-bidir-router.service"
    text = unit.read_text(encoding="utf-8")
    assert "DynamicUser=yes" in text
    offered = re.findall(r"^#LoadCredential=(\S+):/etc/vllm-bidir/\1$", text, re.M)
    lines = (FOLDER / "router.env").read_text(encoding="utf-8")
    named = dict(re.findall(rf"^# (--\S+) /run/credentials/{unit.name}/(\S+)$", lines, re.M))
    assert sorted(offered) == sorted(named.values()) and len(offered) == 4
    assert set(named) <= set(parser()._option_string_actions)
