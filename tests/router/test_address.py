"""Addresses as people write them, and as they stand in URLs."""

from __future__ import annotations

import pytest
from vllm.bidir.router.nodes.address import Address, parse_address
from yarl import URL


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:8100", Address("10.0.0.1", 8100)),
        ("p-0.prefill:8100", Address("p-0.prefill", 8100)),
        ("[2001:db8::1]:8100", Address("2001:db8::1", 8100)),
        ("[fe80::1%eth0]:8100", Address("fe80::1%eth0", 8100)),
        ("dns:prefill.llm.svc:8100", Address("prefill.llm.svc", 8100, many=True)),
        ("https://d:8100", Address("d", 8100, "https")),
        ("d.svc.:8100", Address("d.svc.", 8100)),
        ("[fe80::1%eth0.7]:8100", Address("fe80::1%eth0.7", 8100)),
        ("x" * 63 + ".d_1-2:8100", Address("x" * 63 + ".d_1-2", 8100)),
    ],
)
def test_what_is_written_is_what_is_called(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text.removeprefix("https://")
    if not address.many:
        url = URL(f"{address.scheme}://{address}/v1/completions")
        assert (url.host, url.port, url.path) == (address.host, 8100, "/v1/completions")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("host", "does not end in a port"),
        ("host:", "does not end in a port"),
        ("host:x", "does not end in a port"),
        ("host:99999", "between 1 and 65535"),
        ("host:0", "between 1 and 65535"),
        (":8100", "neither a host name nor"),
        ("a b:8100", "neither a host name nor"),
        ("a/b:8100", "neither a host name nor"),
        ("dns:[::1]:8100", "neither a host name nor"),
        ("2001:db8::1:8100", "brackets"),
        ("ftp://host:8100", "neither http nor https"),
        ("http://a:b@host:8100", "brackets"),
        # All of these have brought Python's look-up to errors that are no OSError.
        ("10.0.0.1..2:8200", "neither a host name nor an IP address; a name's parts between"),
        (".host:8100", "neither a host name nor"),
        ("host..:8100", "neither a host name nor"),
        (".:8100", "neither a host name nor"),
        ("dns:decode..svc:8200", "neither a host name nor"),
        ("d." + "x" * 64 + ":8100", "between its dots have 1 to 63"),
        ("[::1..2]:8100", "neither a host name nor"),
        ("[fe80::1%eth0..1]:8100", "neither a host name nor"),
    ],
)
def test_what_is_wrong_is_said(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_address(text)
