# SPDX-License-Identifier: Apache-2.0
"""What is remembered when D has answered a turn: where its KV lies, or why nowhere."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.bidir.router.conversations.conversations import Conversations, Key
from vllm.bidir.router.conversations.identity import Identities
from vllm.bidir.router.conversations.leases import Ended
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.params import holds_blocks, why_nothing
from vllm.bidir.router.state.state import State
from vllm.bidir.router.turns.admission import Admission
from vllm.bidir.router.turns.responses import Responses, Said
from vllm.bidir.router.turns.turn import Turn


class Keeping:
    """Writes into what a router, or several that share their state, know of conversations."""

    def __init__(
        self,
        conversations: Conversations,
        identities: Identities,
        responses: Responses,
        admission: Admission,
        state: State,
    ) -> None:
        self._conversations = conversations
        self._identities = identities
        self._responses = responses
        self._admission = admission
        self._state = state
        self._under_way: set[asyncio.Future[None]] = set()

    async def keep(self, turn: Turn, node: Node, params: dict[str, Any] | None) -> None:
        """Remember what D has kept of a turn that it has answered, or that it has kept nothing."""
        keeping = self._keep_now(turn, node, params)
        if not self._state.shared:
            await keeping
            return
        # Others have to be asked, and a client that goes meanwhile leaves its lease all the same.
        task = asyncio.ensure_future(keeping)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        await asyncio.shield(task)

    async def _keep_now(self, turn: Turn, node: Node, params: dict[str, Any] | None) -> None:
        kept = self._admission.admit(turn, "decode", node, params)
        place = turn.place
        if place is not None:
            # Whatever another router knows of it.
            if not turn.last:
                await self._state.look_again(place)
            elif place.root is not None:
                await self._state.bring_named(place.root)
        if place is not None and not self._conversations.goes_on(place.key, turn):
            place = None  # forgotten while this turn ran
        if place is None or turn.last:
            self._conversations.put_last(turn.key if place else None, kept or {}, node.name)
            if place is not None:
                await self._forget(self._identities.end(place), Ended.ENDED)
            return
        settled = self._identities.settle(place)
        if node.draining:
            self._conversations.put_left(settled.key, kept or {}, node.name)
        elif kept is not None and holds_blocks(kept):
            self._conversations.put(settled.key, kept, node.name)
        else:
            self._conversations.put_nothing(settled.key, why_nothing(params))
        await self._state.tell(place, settled.key)
        await self._forget(settled.over, Ended.SUPERSEDED)

    async def _forget(self, keys: list[Key], why: Ended) -> None:
        for key in keys:
            self._conversations.forget(key, why)
        if keys:
            await self._state.forget(keys)

    async def keep_response(self, turn: Turn, answer: Said | None) -> None:
        """Keep what a later request may name as its previous response."""
        if turn.asked is not None and answer is not None:
            key = self._responses.keep(turn.asked, answer)
            if key is not None:
                await self._state.tell_response(key)
