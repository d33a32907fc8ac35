"""Key files are read again when they change, and a file that is of no use changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.bidir.router.clients import key_rotation
from vllm.bidir.router.clients.security import key_digest
from vllm.bidir.router.options import parse

from tests.router.conftest import MakeSetup, Setup, until

COUNTED = "bidir_router_key_file_errors_total"


@pytest.fixture
async def rotating(
    make_setup: MakeSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Setup, Path, Path]:
    """A router, the clients' key file and the engines'; files are looked at often."""
    monkeypatch.setattr(key_rotation, "LOOK_S", 0.02)
    clients, engine = tmp_path / "clients", tmp_path / "engine"
    clients.write_text("old\n")
    engine.write_text("engine-old\n")
    options = parse(["--api-key-file", str(clients), "--engine-api-key-file", str(engine)])
    setup = await make_setup(
        security=options.security,
        engine_api_key=options.engine_api_key,
        engine_api_key_file=options.engine_api_key_file,
    )
    return setup, clients, engine


async def status(setup: Setup, key: str) -> int:
    return (await setup.ask(headers={"Authorization": f"Bearer {key}"}))[0]


async def test_new_keys_of_clients_are_taken_and_old_ones_are_not(
    rotating: tuple[Setup, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    setup, clients, _ = rotating
    clients.write_text("old\nnew\n")
    await until(lambda: "clients' keys: 1 added, 0 gone" in caplog.text)
    assert [await status(setup, key) for key in ("old", "new")] == [200, 200]
    clients.write_text("new\n")
    await until(lambda: "clients' keys: 0 added, 1 gone" in caplog.text)
    assert [await status(setup, key) for key in ("old", "new")] == [401, 200]
    assert setup.metric(COUNTED) == 0


async def test_the_engines_new_key_is_shown_on_legs_and_on_lease_calls(
    rotating: tuple[Setup, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    setup, _, engine = rotating
    node = setup.decode[0]
    node.leases.duration_s = 0.3
    for key in ("engine-old", "engine-new"):
        seen = f"Bearer {key}"
        headers = {"Authorization": "Bearer old"}
        assert (await setup.ask(headers=headers, conversation_id="c"))[0] == 200
        assert node.headers[-1]["Authorization"] == seen
        before = len(node.leases.calls)
        await until(lambda begin=before: len(node.leases.calls) > begin)
        assert node.leases.calls[-1].headers["Authorization"] == seen
        if key == "engine-old":
            # As Kubernetes does: the new version takes the place of the old one.
            (engine.parent / "next").write_text("engine-new")
            (engine.parent / "next").rename(engine)
            await until(lambda: "the engines' key is a new one" in caplog.text)
    assert "engine-old" not in caplog.text and "engine-new" not in caplog.text


@pytest.mark.parametrize("text", [b"", b"\n", b"secret key\n", b"secret\xff", b"secret\x00\n"])
async def test_a_file_that_is_of_no_use_changes_nothing_and_is_counted(
    rotating: tuple[Setup, Path, Path], text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    setup, clients, engine = rotating
    clients.write_bytes(text)
    engine.write_bytes(text)
    await until(lambda: setup.metric(COUNTED) == 2)
    assert "stay as they were" in caplog.text and "secret" not in caplog.text
    assert await status(setup, "old") == 200
    assert setup.decode[0].headers[-1]["Authorization"] == "Bearer engine-old"
    clients.write_text("new\n")
    await until(lambda: setup.router.keys.clients == {key_digest("new")})


async def test_a_file_that_is_gone_for_a_moment_changes_nothing(
    rotating: tuple[Setup, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    setup, clients, _ = rotating
    clients.unlink()
    assert await status(setup, "old") == 200
    clients.write_text("new\n")
    await until(lambda: "1 added, 1 gone" in caplog.text)
    assert [await status(setup, key) for key in ("old", "new")] == [401, 200]
