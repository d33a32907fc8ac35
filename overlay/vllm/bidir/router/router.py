# SPDX-License-Identifier: Apache-2.0
"""What one router is made of, and what lives as long as it does."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

from vllm.bidir.router.clients.access import Access
from vllm.bidir.router.clients.certificate import ServerCertificate
from vllm.bidir.router.clients.draining import Draining
from vllm.bidir.router.clients.key_rotation import KeyRotation
from vllm.bidir.router.clients.keys import Keys
from vllm.bidir.router.conversations.conversations import Bounds, Conversations
from vllm.bidir.router.conversations.heartbeat import Heartbeat
from vllm.bidir.router.conversations.identity import Identities
from vllm.bidir.router.conversations.leases import Leases
from vllm.bidir.router.nodes import policies
from vllm.bidir.router.nodes.calls import Calls
from vllm.bidir.router.nodes.checks import HealthChecks
from vllm.bidir.router.nodes.client import NodeClient
from vllm.bidir.router.nodes.discovery import Discovery, NodeList
from vllm.bidir.router.nodes.gauges import NodeGauges
from vllm.bidir.router.nodes.pool import Pool
from vllm.bidir.router.nodes.side_channels import SideChannels
from vllm.bidir.router.options import RouterOptions
from vllm.bidir.router.process.background import Background
from vllm.bidir.router.state.lines import SharedLines
from vllm.bidir.router.state.redis_link import RedisLink
from vllm.bidir.router.state.shared import Shared
from vllm.bidir.router.state.state import Alone, State
from vllm.bidir.router.status.status import Sources, version
from vllm.bidir.router.telemetry import trace_options
from vllm.bidir.router.telemetry.metrics import Metrics
from vllm.bidir.router.turns.admission import Admission
from vllm.bidir.router.turns.decode_leg import DecodeLeg
from vllm.bidir.router.turns.keeping import Keeping
from vllm.bidir.router.turns.legs import Legs
from vllm.bidir.router.turns.prefill_leg import PrefillLeg
from vllm.bidir.router.turns.recall import Recall
from vllm.bidir.router.turns.responses import Responses
from vllm.bidir.router.turns.turns import Turns


class Router:
    """Everything one router owns; `app.App` serves requests with it.

    `failed`: something that runs beside the requests has ended with an error, and the router ends.
    """

    def __init__(self, options: RouterOptions) -> None:
        self.options = options
        self.metrics = Metrics()
        self.draining = Draining(options.drain_delay, options.drain_timeout, self.metrics)
        self.keys = Keys(options.security.client_keys, options.engine_api_key)
        self.access = Access(options.security, self.keys)
        self.certificate: ServerCertificate | None = None
        if options.security.tls is not None:
            self.certificate = ServerCertificate(options.security, self.metrics)
        nodes = options.nodes
        self.prefill = Pool(
            "prefill",
            policies.PREFILL[nodes.prefill_policy](),
            nodes.limits(nodes.prefill_in_flight),
            nodes.rules(),
            self.metrics,
        )
        self.decode = Pool(
            "decode",
            policies.DECODE[nodes.decode_policy](),
            nodes.limits(nodes.decode_in_flight),
            nodes.rules(),
            self.metrics,
            always=True,
        )
        self.metrics.registry.register(NodeGauges((self.prefill, self.decode)))
        self.discovery = Discovery(
            NodeList(options.prefill, options.decode),
            options.nodes.file,
            options.nodes.dns_interval,
            self.prefill,
            self.decode,
            self.metrics,
        )
        self.leases = Leases(self.metrics)
        bounds = Bounds(
            options.max_conversations,
            options.max_kept_params,
            options.conversation_ttl,
            options.conversation_idle_timeout,
        )
        self.conversations = Conversations(bounds, self.leases, time.monotonic)
        # Two for each conversation: its last turn, and one more to which a fork may go back.
        self.identities = Identities(2 * options.max_conversations)
        self.responses = Responses(options.security.max_stored_responses, options.max_body)
        self.metrics.leases.set_function(lambda: len(self.leases))
        self.metrics.conversations.set_function(lambda: len(self.conversations))
        self.metrics.params_bytes.set_function(lambda: self.conversations.params_bytes)
        self.sources = Sources(
            self.draining,
            (self.prefill, self.decode),
            self.conversations,
            self.leases,
            self.metrics,
            time.monotonic(),
        )
        self.failed = False
        self.tracing = trace_options.start(options.otlp_traces_endpoint, version())
        self.calls: Calls | None = None
        self.turns: Turns | None = None
        self.state: State = Alone()
        self._link: RedisLink | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Open the client, watch nodes come up, renew leases; end it all at the end."""
        tls = self.options.security.engine_context()
        with closing(NodeClient(self.options.connect_timeout, tls)) as client:
            self.calls = Calls(client)
            side_channels = SideChannels(self.options.security.side_channels)
            for pool in (self.prefill, self.decode):
                pool.watch(side_channels)
            await self._open_state(side_channels)
            recall = Recall(
                self.calls,
                self.decode.named,
                side_channels,
                self.metrics,
                self.keys,
            )
            self.turns = self._make_turns(Legs(client), side_channels, recall)
            heartbeat = Heartbeat(
                self.calls,
                self.conversations,
                self.leases,
                self.metrics,
                self.keys,
                self.state,
            )
            self.decode.watch(heartbeat)
            await self.discovery.start()
            checks = HealthChecks(
                self.calls, (self.prefill, self.decode), self.options.nodes.health_interval
            )
            rotation = KeyRotation(
                self.keys,
                self.options.security.client_key_file,
                self.options.engine_api_key_file,
                self.metrics,
            )
            runs = [self.discovery.run, checks.run, heartbeat.run, rotation.run]
            if self._link is not None:
                runs.append(self._link.run)
            if self.certificate is not None:
                runs.append(self.certificate.run)
            background = Background(self._fail)
            background.start(runs)
            try:
                yield
            finally:
                await background.end()
                await heartbeat.say_goodbye()
                if self._link is not None:
                    await self._link.close()
                if self.tracing is not None:
                    await self.tracing.close()

    def _make_turns(self, legs: Legs, side_channels: SideChannels, recall: Recall) -> Turns:
        admission = Admission(side_channels, self.metrics)
        keeping = Keeping(
            self.conversations, self.identities, self.responses, admission, self.state
        )
        prefill = PrefillLeg(legs, self.prefill, admission, self.metrics)
        return Turns(
            prefill,
            DecodeLeg(legs, self.decode, prefill, keeping, self.metrics),
            self.decode,
            self.conversations,
            self.metrics,
            self.access,
            self.identities,
            self.responses,
            recall,
            self.state,
        )

    def _fail(self) -> None:
        """End as at SIGTERM, and not as if all were well."""
        self.failed = True
        if not self.draining.begun:
            self.draining.tell()

    async def _open_state(self, side_channels: SideChannels) -> None:
        """Where several routers share one: reach for it, for a moment, and look after it."""
        options = self.options.state
        if options.url is None:
            return
        self._link = RedisLink(options.url, options.timeout, self.metrics)
        lines = SharedLines(
            self._link,
            options.prefix,
            max(self.options.conversation_ttl, self.options.conversation_idle_timeout),
            self.conversations,
            self.identities,
            side_channels,
            self.decode.named,
            self.metrics,
        )
        self.state = Shared(self._link, lines, self.responses, options.responses_ttl)
        await self._link.start()
