# SPDX-License-Identifier: Apache-2.0
"""What several routers would have to tell each other, and a router that is alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from vllm.bidir.router.clients.request import TurnRequest
from vllm.bidir.router.conversations.conversations import Key
from vllm.bidir.router.conversations.identity import Place, Trace


class State(Protocol):
    """Brings in what other routers have done, and tells them what this one has.

    Nothing here ever fails or waits for long: what cannot be brought in is not known.
    """

    shared: bool

    async def bring(self, trace: Trace) -> None:
        """The last turn of the line that a request goes on with."""

    async def bring_named(self, root: Key) -> None:
        """The last turns of all lines of a named conversation."""

    async def bring_responses(self, tenant: str, request: TurnRequest) -> None:
        """The responses that a request continues."""

    async def look_again(self, place: Place) -> None:
        """A turn is about to be kept: see whether another router has gone on meanwhile."""

    async def tell(self, place: Place, key: Key) -> None:
        """What has been kept of a turn, under this key."""

    async def tell_response(self, key: Key) -> None:
        """A response that has been kept, under this key."""

    async def forget(self, keys: Iterable[Key]) -> None:
        """These are over."""

    async def give_up(self, keys: Iterable[Key]) -> set[Key]:
        """Which of these no other router has taken over; they are over with this one."""


class Alone:
    """One router, whose memory is all there is."""

    shared = False

    async def bring(self, trace: Trace) -> None:
        """There is nobody else."""

    async def bring_named(self, root: Key) -> None:
        """There is nobody else."""

    async def bring_responses(self, tenant: str, request: TurnRequest) -> None:
        """There is nobody else."""

    async def look_again(self, place: Place) -> None:
        """There is nobody else."""

    async def tell(self, place: Place, key: Key) -> None:
        """There is nobody else."""

    async def tell_response(self, key: Key) -> None:
        """There is nobody else."""

    async def forget(self, keys: Iterable[Key]) -> None:
        """There is nobody else."""

    async def give_up(self, keys: Iterable[Key]) -> set[Key]:
        """All of them."""
        return set(keys)
