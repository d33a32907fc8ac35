"""The server's certificate is a new one when its files are, and only where they are of use."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from vllm.bidir.router.clients import certificate
from vllm.bidir.router.clients.security import Security
from vllm.bidir.router.options import RouterOptions, parse
from vllm.bidir.router.router import Router

from tests.router.conftest import RouterServer, until
from tests.router.tls import make_certificate

COUNTED = "bidir_router_key_file_errors_total"


@pytest.fixture
async def serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Router, int]]:
    """A router with an RSA certificate in the folder, and its port; files are looked at often."""
    monkeypatch.setattr(certificate, "LOOK_S", 0.02)
    router = Router(
        RouterOptions((), (), security=Security(tls=make_certificate(tmp_path, kind="rsa")))
    )
    assert router.certificate is not None
    server = RouterServer(router)
    await server.start_server()
    yield router, server.port
    await server.close()


async def shown(port: int, name: str = "") -> bytes:
    """The certificate that a client is shown who asks for `name`, or says no name."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname=name)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


def in_file(cert: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(cert.read_text())


async def test_a_renewed_certificate_is_shown_to_those_who_connect_from_then_on(
    serving: tuple[Router, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    router, port = serving
    before = in_file(tmp_path / "cert.pem")
    assert await shown(port) == await shown(port, "some.name") == before
    reader, writer = await asyncio.open_connection(
        *("127.0.0.1", port), ssl=ssl.create_default_context(cafile=tmp_path / "cert.pem")
    )
    (tmp_path / "next").mkdir()
    # For another kind of key: the old one must not stay beside it.
    for made in make_certificate(tmp_path / "next", kind="ec"):
        made.rename(tmp_path / made.name)
    await until(lambda: "the server's certificate is a new one" in caplog.text)
    after = in_file(tmp_path / "cert.pem")
    assert await shown(port) == await shown(port, "some.name") == after != before
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert router.metrics.registry.get_sample_value(COUNTED) == 0


@pytest.mark.parametrize("wrong", ["cert.pem", "key.pem", "nonsense", "passphrase"])
async def test_files_that_are_of_no_use_change_nothing_and_are_counted(
    serving: tuple[Router, int],
    tmp_path: Path,
    wrong: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    router, port = serving
    before = in_file(tmp_path / "cert.pem")
    (tmp_path / "next").mkdir()
    passphrase = "secret" if wrong == "passphrase" else None
    cert, key = make_certificate(tmp_path / "next", passphrase=passphrase)
    if wrong == "nonsense":
        (tmp_path / "cert.pem").write_text("secret")
    elif wrong == "passphrase":
        for made in (cert, key):
            made.rename(tmp_path / made.name)
    else:  # one without the other
        (tmp_path / "next" / wrong).rename(tmp_path / wrong)
    await until(lambda: bool(router.metrics.registry.get_sample_value(COUNTED)))
    assert "the certificate stays as it was" in caplog.text and "secret" not in caplog.text
    assert await shown(port) == before
    for made in make_certificate(tmp_path / "next"):
        made.rename(tmp_path / made.name)
    after = in_file(tmp_path / "cert.pem")
    for _ in range(200):
        if await shown(port) == after:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the new certificate is not shown")


def test_a_key_with_a_passphrase_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = make_certificate(tmp_path, passphrase="secret")
    with pytest.raises(SystemExit):
        parse(["--tls-cert", str(cert), "--tls-key", str(key)])
    assert "--tls-cert and --tls-key cannot be used" in capsys.readouterr().err
