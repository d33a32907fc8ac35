"""What a decode node says of its leases."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from tools.bench.errors import BenchError


def lease_totals(url: str) -> dict[str, Any]:
    """The totals of the engine at `url`; BenchError if it does not tell."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request("GET", "/v1/kv_leases")
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(
            "leases cannot be counted", file=url, expected="an answer", found=error
        ) from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise BenchError(
            "leases cannot be counted",
            file=f"{url}/v1/kv_leases",
            expected="status 200",
            found=f"{answer.status} {text[:300]!r}",
            next_step="does this environment have the release that grants leases?",
        )
    found: dict[str, Any] = json.loads(text)
    return found
