# SPDX-License-Identifier: Apache-2.0
"""`/v1/kv_leases`: what a decode node keeps is renewed, released, read and counted over HTTP.

Below `/v1`, because the server's API-key check covers only such prefixes. A lease id names the
data-parallel rank that keeps the turn; that rank's engine core, and no other, is asked about it.
An id that no engine of this server can know is answered as lost, and never fails the others.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Request, Response
from vllm.bidir.connector.hooks import nixl_configs
from vllm.bidir.connector.options import SWITCH
from vllm.config import KVTransferConfig
from vllm.logger import init_logger

if TYPE_CHECKING:
    from argparse import Namespace

logger = init_logger(__name__)

PATH = "/v1/kv_leases"
MOST_IDS = 10_000
_SHOWN = 64
_LEASE_ID = re.compile(r"d(0|[1-9][0-9]{0,4})-[0-9a-f]{32}")

# An engine core answers between two steps. One that dies meanwhile never does, and the call does
# not hear of it: so it is looked at.
_LOOK_S = 0.5
_LIMIT_S = 10.0

_KEPT = ("leases", "blocks", "holds", "budget_blocks", "total_blocks")
_COUNTED = ("renewals", "refused", "reclaimed", "expired", "released")


def attach_kv_leases(app: FastAPI, args: Namespace, supported_tasks: Iterable[str]) -> None:
    """Add the routes to a server that generates text, if a NIXL connector of it reads back."""
    config: Any = getattr(args, "kv_transfer_config", None)
    if isinstance(config, dict):  # as a program gives it; the command line's is parsed
        config = KVTransferConfig(**config)
    if "generate" not in supported_tasks:
        return
    if not any(extra.get(SWITCH) for extra in nixl_configs(config)):
        return
    router = APIRouter()
    router.add_api_route(f"{PATH}/renew", renew, methods=["POST"])
    router.add_api_route(f"{PATH}/release", release, methods=["POST"])
    router.add_api_route(PATH, read_totals, methods=["GET"])
    router.add_api_route(f"{PATH}/{{lease_id}}", read_lease, methods=["GET"])
    app.include_router(router)


async def renew(request: Request) -> Response:
    """`{"lease_ids": [...]}` gives `{"renewed": {id: seconds left}, "lost": [id...]}`.

    400 for another body, 413 for more than MOST_IDS ids, 503 for an engine that does not answer;
    what the other engines were asked has been done then.
    """
    return await _response(_renew(request))


async def release(request: Request) -> Response:
    """`{"lease_ids": [...]}` gives `{"released": [id...], "lost": [id...]}`; errors as `renew`."""
    return await _response(_release(request))


async def read_lease(request: Request, lease_id: str) -> Response:
    """The `kv_transfer_params` of one kept turn; 404 when it is gone."""
    # The access log shows the path when the answer starts: uvicorn before 0.55 as it was decoded,
    # from then on as it was sent. Lease ids stay out of logs.
    path = request.scope["path"].removesuffix(lease_id) + "-"
    request.scope.update(path=path, raw_path=quote(path).encode())
    return await _response(_read_lease(request, lease_id))


async def read_totals(request: Request) -> Response:
    """What all engines of this server keep: counts added up, the oldest's age, each rank's own."""
    return await _response(_read_totals(request))


async def _renew(request: Request) -> dict[str, Any]:
    renewed: dict[str, float] = {}
    answers, lost = await _by_rank(request, "renew")
    for answer in answers:
        renewed |= answer["renewed"]
    return {"renewed": renewed, "lost": lost}


async def _release(request: Request) -> dict[str, Any]:
    answers, lost = await _by_rank(request, "release")
    return {"released": [one for answer in answers for one in answer["released"]], "lost": lost}


async def _read_lease(request: Request, lease_id: str) -> dict[str, Any]:
    engines = _Engines(request.app.state.engine_client)
    rank = engines.rank_of(lease_id)
    if rank is not None:
        answers = await engines.ask("read", {rank: [lease_id]})
        params: dict[str, Any] | None = answers[rank]["params"]
        if params is not None:
            return params
    raise _RefusedError(
        HTTPStatus.NOT_FOUND, "NotFoundError", "no turn is kept under this lease id"
    )


async def _read_totals(request: Request) -> dict[str, Any]:
    engines = _Engines(request.app.state.engine_client)
    answers = await engines.ask("totals", {rank: [] for rank in engines.ranks()})
    ranks = [
        {"rank": rank, **answer["totals"]}
        for rank, answer in answers.items()
        if answer["totals"] is not None
    ]
    ages = [one["oldest_s"] for one in ranks if one["oldest_s"] is not None]
    return {
        "mode": ranks[0]["mode"] if ranks else None,
        **{key: sum(one[key] for one in ranks) for key in (*_KEPT, *_COUNTED)},
        "oldest_s": max(ages, default=None),
        "ranks": ranks,
    }


async def _by_rank(request: Request, word: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """The answers of all ranks that the body's ids name, and what is lost."""
    engines = _Engines(request.app.state.engine_client)
    ids: dict[int, list[str]] = {}
    lost: list[Any] = []
    for lease_id in _read_ids(await request.body()):
        rank = engines.rank_of(lease_id)
        if rank is None:
            lost.append(lease_id)
        else:
            ids.setdefault(rank, []).append(lease_id)
    answers = list((await engines.ask(word, ids)).values())
    lost += [lease_id for answer in answers for lease_id in answer["lost"]]
    return answers, lost


class _Engines:
    """The engine cores that this API server talks to, by data-parallel rank.

    All ranks where the server balances between them; those of its own node, or its only one, where
    something in front of several servers does.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._identities = {
            int.from_bytes(identity, "little"): identity
            for identity in client.engine_core.core_engines
        }

    def ranks(self) -> list[int]:
        return list(self._identities)

    def rank_of(self, lease_id: Any) -> int | None:
        """None for what is no lease id, or names a rank elsewhere."""
        match = _LEASE_ID.fullmatch(lease_id) if isinstance(lease_id, str) else None
        rank = int(match[1]) if match else None
        return rank if rank in self._identities else None

    async def ask(self, word: str, ids: Mapping[int, list[str]]) -> dict[int, dict[str, Any]]:
        """Each of these ranks' answer, all asked at once; a refusal if one does not answer."""
        core = self._client.engine_core
        tasks = {
            rank: asyncio.ensure_future(
                core._call_utility_async(
                    "kv_leases", word, lease_ids, engine=self._identities[rank]
                )
            )
            for rank, lease_ids in ids.items()
        }
        try:
            await self._wait(tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        answers = {rank: task.result() for rank, task in tasks.items()}
        for rank, answer in answers.items():
            _show(rank, answer["totals"])
        return answers

    async def _wait(self, tasks: Iterable[asyncio.Future[Any]]) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + _LIMIT_S
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=_LOOK_S, return_when=asyncio.FIRST_EXCEPTION
            )
            failed = [error for task in done if (error := task.exception()) is not None]
            if failed:
                raise _no_answer(type(failed[0]).__name__)
            if pending and self._client.errored:
                raise _no_answer("it is dead")
            if pending and clock() >= until:
                raise _no_answer(f"none within {_LIMIT_S:g} s")


class _RefusedError(Exception):
    """An answer with an error's status; `kind` is the error's type in the OpenAI shape."""

    def __init__(self, status: HTTPStatus, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


def _no_answer(why: str) -> _RefusedError:
    # The engine core itself logs why it failed.
    logger.warning("an engine does not answer about leases: %s", why)
    return _RefusedError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "ServiceUnavailableError",
        "an engine of this server does not answer",
    )


async def _response(work: Awaitable[dict[str, Any]]) -> Response:
    status = HTTPStatus.OK
    try:
        content = await work
    except _RefusedError as refusal:
        status = refusal.status
        content = {
            "error": {
                "message": str(refusal),
                "type": refusal.kind,
                "param": None,
                "code": status.value,
            }
        }
    # In ASCII: what a client sent as half a character has no other form to be sent back in.
    return Response(json.dumps(content), status.value, media_type="application/json")


def _read_ids(body: bytes) -> list[Any]:
    """What a call asks about, each once, in the form that it is answered in."""
    try:
        content = json.loads(body, parse_constant=_no_json)
        asked = content.get("lease_ids") if isinstance(content, dict) else None
        ids = [_shown(one) for one in asked] if isinstance(asked, list) else None
    except (ValueError, RecursionError):
        ids = None
    if ids is None:
        raise _RefusedError(
            HTTPStatus.BAD_REQUEST, "BadRequestError", 'the body must be {"lease_ids": [...]}'
        )
    if len(ids) > MOST_IDS:
        raise _RefusedError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "BadRequestError",
            f"at most {MOST_IDS} lease_ids a call, not {len(ids)}",
        )
    # By type, too: 1 and true are equal here, and are not in JSON.
    return list({(type(one), one): one for one in ids}.values())


def _shown(one: Any) -> Any:
    """As given; strings cut short, and what JSON cannot simply repeat as a string."""
    nested = isinstance(one, (list, dict))
    if nested or (isinstance(one, float) and not math.isfinite(one)):
        one = json.dumps(one)
    return one[:_SHOWN] if isinstance(one, str) else one


def _no_json(constant: str) -> None:
    raise ValueError(constant)


def _show(rank: int, totals: dict[str, Any] | None) -> None:
    """An engine at rest sends no statistics; what it says here keeps the gauges true."""
    from vllm.bidir.connector.stats import show_leases

    if totals is not None:
        show_leases(rank, totals)
