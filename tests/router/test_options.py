"""The sample proxy's command lines work here, and wrong ones say what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from vllm.bidir.router.clients.security import CLIENT_KEYS_VARIABLE, key_digest
from vllm.bidir.router.options import API_KEY_VARIABLE, Address, RouterOptions, parse, parser
from vllm.bidir.router.state.options import STATE_VARIABLE

from tests.router.options_page import PAGE, with_options

OVERLAY = Path(__file__).resolve().parents[2] / "overlay"


def test_defaults_are_those_of_the_sample_proxy() -> None:
    assert parse([]) == RouterOptions(
        host="0.0.0.0",
        port=8000,
        prefill=(Address("localhost", 8100),),
        decode=(Address("localhost", 8200),),
    )


@pytest.mark.parametrize("plural", ["", "s"])
def test_hosts_and_ports_pair_up(plural: str) -> None:
    options = parse(
        [
            *("--host", "0.0.0.0", "--port", "9000"),
            *(f"--prefiller-host{plural}", "p1", "p2", f"--prefiller-port{plural}", "1", "2"),
            *(f"--decoder-host{plural}", "d1", f"--decoder-port{plural}", "3"),
        ]
    )
    assert options.prefill == (Address("p1", 1), Address("p2", 2))
    assert options.decode == (Address("d1", 3),)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--prefiller-hosts", "a", "b"], "one port for each host"),
        (["--decoder-ports", "1", "2"], "one port for each host"),
        (["--port", "70000"], "--port must be between"),
        (["--decoder-port", "0"], "--decoder-port must be between"),
        (["--decoder-hosts", "a", "a", "--decoder-ports", "1", "1"], "the same node twice"),
        (["--max-conversations", "0"], "--max-conversations must be between"),
        (["--conversation-idle-timeout", "-1"], "--conversation-idle-timeout must be between"),
        (["--dns-interval", "0"], "--dns-interval must be between 0.1 and 1e+06, not 0"),
        (["--queue-limit", "-1"], "--queue-limit must be between"),
        (["--eject-time", "nan"], "--eject-time must be between"),
        (["--decoder-host", "http://d/v1"], "--decoder-host: 'd/v1' is neither a host name"),
        (["--engine-api-key-file", "/no/such"], "/no/such cannot be read: No such file"),
        (["--api-key-file", "/no/such"], "/no/such cannot be read: No such file"),
        (["--tls-key", "/no/such"], "--tls-key needs --tls-cert"),
        (["--tls-cert", "/no/such"], "--tls-cert and --tls-key cannot be used: No such file"),
        (["--engine-ca-file", "/no/such"], "--engine-ca-file cannot be used: No such file"),
        (["--side-channel", "x"], "--side-channel 'x' is not NODE=HOST"),
        (["--max-header", "1"], "--max-header must be between 256 and"),
    ],
)
def test_contradictions_are_refused(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_every_option_names_its_default() -> None:
    for action in parser()._actions:
        assert action.dest == "help" or "default" in str(action.help), action.option_strings


def test_the_page_lists_the_options_as_they_are() -> None:
    page = PAGE.read_text("utf-8")
    assert with_options(page, parser()) == page, "run `make docs`"
    changed = parser()
    changed.add_argument("--another", help="with a | in it; default none")
    assert "| `--another ANOTHER` | with a \\| in it; default none |" in with_options(page, changed)


def test_the_engines_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse([]).engine_api_key is None
    monkeypatch.setenv(API_KEY_VARIABLE, "from-env")
    assert parse([]).engine_api_key == "from-env"
    path = tmp_path / "key"
    path.write_text("from-file\n")
    options = parse(["--engine-api-key-file", str(path)])
    assert options.engine_api_key == "from-file"
    assert "from-file" not in repr(options)


def test_clients_keys_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse([]).security.client_keys == frozenset()
    monkeypatch.setenv(CLIENT_KEYS_VARIABLE, "from-env")
    assert parse([]).security.client_keys == {key_digest("from-env")}
    path = tmp_path / "keys"
    path.write_text("key-1\n\n key-2 \n")
    options = parse(["--api-key-file", str(path)])
    assert options.security.client_keys == {key_digest("key-1"), key_digest("key-2")}
    assert "frozenset" not in repr(options)


@pytest.mark.parametrize("text", ["", "\n", "secret key", "secret\x00", "secret \u00fc"])
def test_a_file_that_holds_no_clients_keys_is_refused_without_showing_it(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(SystemExit):
        parse(["--api-key-file", str(path)])
    said = capsys.readouterr().err
    assert f"--api-key-file {path} must hold keys" in said and "secret" not in said


def test_hosts_may_be_ipv6_or_https() -> None:
    options = parse(["--prefiller-host", "https://p", "--decoder-host", "[::1]"])
    assert options.prefill == (Address("p", 8100, "https"),)
    assert options.decode == (Address("::1", 8200),) and str(options.decode[0]) == "[::1]:8200"


@pytest.mark.parametrize("host", ["ftp://p", "https://", "a/b", "p:80", ""])
def test_a_host_that_is_none_is_refused(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--decoder-host", host])
    assert "--decoder-host" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"a b", b"a\nb", b"a\x00", b"\xff", "\u00fc".encode()]
)
def test_a_file_that_holds_no_key_is_refused_without_showing_it(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"secret" + text if text.strip() else text)
    with pytest.raises(SystemExit):
        parse(["--engine-api-key-file", str(path)])
    said = capsys.readouterr().err
    assert f"--engine-api-key-file {path}" in said and "secret" not in said


def test_the_command_starts_without_torch_and_without_vllm_itself() -> None:
    """`import vllm` would load torch: seconds, and hundreds of MB."""
    code = (
        "import sys; sys.argv = ['vllm-bidir-router', '--help']\n"
        "import vllm_bidir_router\n"
        "try:\n    vllm_bidir_router.main()\n"
        "except SystemExit as ended:\n    assert ended.code == 0\n"
        "assert 'vllm.bidir.router.app' in sys.modules\n"
        "assert 'torch' not in sys.modules and 'vllm.env_override' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=OVERLAY, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--prefiller-host" in done.stdout and "example:" in done.stdout


def test_a_taken_port_is_named(unused_tcp_port: int) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", unused_tcp_port))
        taken.listen()
        argv = ["--host", "127.0.0.1", "--port", str(unused_tcp_port)]
        done = subprocess.run(
            [sys.executable, "-m", "vllm_bidir_router", *argv],
            capture_output=True,
            text=True,
            cwd=OVERLAY,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{unused_tcp_port}" in done.stderr
    assert "CRITICAL" not in done.stderr  # what runs beside the requests has ended in peace


REDIS = "redis://:s3cret@redis.example:6380/2"


def test_the_shared_state_is_named_by_flag_file_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    path.write_text(REDIS + "\n")
    assert parse([]).state.url is None
    for argv in (["--state", REDIS], ["--state-file", str(path)]):
        assert parse(argv).state.url == REDIS
    monkeypatch.setenv(STATE_VARIABLE, REDIS)
    assert parse([]).state.url == REDIS
    assert parse(["--state", "memory"]).state.url is None
    assert "s3cret" not in repr(parse([])) and "redis.example" not in repr(parse([]))
    assert "s3cret" not in parser().format_help()


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--state", "http://s3cret"], "--state must be memory, or begin with redis://"),
        (["--state", "redis://s3cret x"], "--state must be memory, or begin with redis://"),
        (["--state", "redis://:s3cret@h:port"], "--state is no URL of a Redis"),
        (["--state", "redis://:s3cret@h?socket_timeout=x"], "--state is no URL of a Redis"),
        (["--state", "redis://:s3cret@h..h:6379"], "--state is no URL of a Redis"),
        (["--state-file", "/no/such"], "--state-file /no/such cannot be read: No such file"),
        (["--state", "memory", "--state-file", "/no"], "give one of --state and --state-file"),
        (["--state-prefix", "a b"], "--state-prefix must be printable"),
        (["--state-timeout", "0"], "--state-timeout must be between"),
        (["--state-responses-ttl", "-1"], "--state-responses-ttl must be between"),
    ],
)
def test_a_wrong_state_is_said_without_its_text(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and complaint in said and "s3cret" not in said


def test_a_redis_without_its_client_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse(["--state", REDIS])
    assert "pip install" in capsys.readouterr().err
