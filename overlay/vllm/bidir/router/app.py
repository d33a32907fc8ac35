# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP server: routes, errors, and what lives as long as the process."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from vllm.bidir.router import openapi
from vllm.bidir.router.clients.access import Access
from vllm.bidir.router.clients.certificate import ServerCertificate
from vllm.bidir.router.clients.draining import Draining
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.clients.headers import LOGGED, NAMED, REQUEST_ID, request_id
from vllm.bidir.router.clients.key_rotation import KeyRotation
from vllm.bidir.router.clients.keys import Keys
from vllm.bidir.router.clients.request import APIS
from vllm.bidir.router.conversations.conversations import Bounds, Conversations, conversation_key
from vllm.bidir.router.conversations.heartbeat import Heartbeat
from vllm.bidir.router.conversations.identity import Identities
from vllm.bidir.router.conversations.leases import Ended, Leases
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
from vllm.bidir.router.side_calls import GET, POST, SideCalls
from vllm.bidir.router.state.lines import SharedLines
from vllm.bidir.router.state.redis_link import RedisLink
from vllm.bidir.router.state.shared import Shared
from vllm.bidir.router.state.state import Alone, State
from vllm.bidir.router.status import page as status_page
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

logger = logging.getLogger("vllm_bidir_router")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """Everything one router owns; `make_app` wires it into an aiohttp application.

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
        self._sources = Sources(
            self.draining,
            (self.prefill, self.decode),
            self.conversations,
            self.leases,
            self.metrics,
            time.monotonic(),
        )
        self.failed = False
        self.tracing = trace_options.start(options.otlp_traces_endpoint, version())
        self._calls: Calls | None = None
        self._turns: Turns | None = None
        self._state: State = Alone()
        self._link: RedisLink | None = None

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        """Open the client, watch nodes come up, renew leases; end it all at the end."""
        tls = self.options.security.engine_context()
        with closing(NodeClient(self.options.connect_timeout, tls)) as client:
            self._calls = Calls(client)
            side_channels = SideChannels(self.options.security.side_channels)
            for pool in (self.prefill, self.decode):
                pool.watch(side_channels)
            await self._open_state(side_channels)
            recall = Recall(
                self._calls,
                self.decode.named,
                side_channels,
                self.metrics,
                self.keys,
            )
            self._turns = self._make_turns(Legs(client), side_channels, recall)
            heartbeat = Heartbeat(
                self._calls,
                self.conversations,
                self.leases,
                self.metrics,
                self.keys,
                self._state,
            )
            self.decode.watch(heartbeat)
            await self.discovery.start()
            checks = HealthChecks(
                self._calls, (self.prefill, self.decode), self.options.nodes.health_interval
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
            yield
            await background.end()
            await heartbeat.say_goodbye()
            if self._link is not None:
                await self._link.close()
            if self.tracing is not None:
                await self.tracing.close()

    def _make_turns(self, legs: Legs, side_channels: SideChannels, recall: Recall) -> Turns:
        admission = Admission(side_channels, self.metrics)
        keeping = Keeping(
            self.conversations, self.identities, self.responses, admission, self._state
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
            self._state,
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
        self._state = Shared(self._link, lines, self.responses, options.responses_ttl)
        await self._link.start()

    async def generate(self, http: web.Request) -> web.StreamResponse:
        assert self._turns is not None  # set before the server listens
        return await self._turns.serve(http)

    async def side_call(self, http: web.Request) -> web.StreamResponse:
        assert self._calls is not None  # set before the server listens
        return await SideCalls(self._calls, self.access, self.decode.candidates).serve(http)

    async def show_conversation(self, http: web.Request) -> web.StreamResponse:
        """What is kept of a conversation of this tenant: no ids, and nothing of what was said."""
        tenant = self.access.tenant(http.headers)
        root = conversation_key(tenant, http.match_info["id"])
        await self._state.bring_named(root)
        keys = self.identities.keys_of(root)
        lines = [told for key in keys if (told := self.conversations.tell(key)) is not None]
        if not lines:
            raise ClientError(404, "No such conversation is remembered.")
        return web.json_response({"object": "conversation", "lines": lines})

    async def show_version(self, http: web.Request) -> web.StreamResponse:
        return web.json_response({"version": version()})

    async def show_openapi(self, http: web.Request) -> web.StreamResponse:
        return web.json_response(openapi.describe(version()))

    async def end_conversation(self, http: web.Request) -> web.StreamResponse:
        """Forget a conversation of this tenant and give its lease back."""
        tenant = self.access.tenant(http.headers)
        root = conversation_key(tenant, http.match_info["id"])
        await self._state.bring_named(root)
        keys = self.identities.end_named(root)
        known = sum(self.conversations.forget(key, Ended.DELETED) for key in keys)
        await self._state.forget(keys)
        if not known:
            raise ClientError(404, "No such conversation is remembered.")
        return web.Response(status=204)

    async def health(self, http: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def ready(self, http: web.Request) -> web.StreamResponse:
        """Whether a turn can be served: D serve alone, P do not."""
        if self.draining.begun:
            raise ClientError(503, "The router is shutting down.")
        known = bool(self.options.nodes.health_interval)
        up = {
            pool.role: sum(bool(node.health.up) or not known for node in pool.usable())
            for pool in (self.prefill, self.decode)
        }
        if not up["decode"]:
            raise ClientError(503, "No decode node is up. Try again later.")
        return web.Response(text=f"up: {up['prefill']} prefill, {up['decode']} decode\n")

    async def show_status(self, http: web.Request) -> web.StreamResponse:
        data = msgspec.json.encode(self._sources.status())
        return web.Response(body=data, content_type="application/json")

    async def show_page(self, http: web.Request) -> web.StreamResponse:
        return web.Response(
            body=status_page.page(self._sources.status()),
            content_type="text/html",
            charset="utf-8",
            headers=status_page.headers(),
        )

    async def count(self, http: web.Request, response: web.StreamResponse) -> None:
        """An answer is about to be sent."""
        resource = http.match_info.route.resource
        self.metrics.answered(resource.canonical if resource else "unknown", response.status)

    async def show_metrics(self, http: web.Request) -> web.StreamResponse:
        data = generate_latest(self.metrics.registry)
        return web.Response(body=data, headers={"Content-Type": CONTENT_TYPE_LATEST})


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal of the router itself has the error shape of its API, else OpenAI's.

    And the request's id, the one that its log lines begin with, also where it has been made here.
    """
    named = request_id(request.headers)
    NAMED.set(named)
    try:
        return await handler(request)
    except ClientError as refusal:
        error = refusal
    except web.HTTPRequestEntityTooLarge:
        limit = request.client_max_size
        error = ClientError(413, f"The body exceeds {limit} bytes (--max-body).")
    except web.HTTPNotFound:
        error = ClientError(404, f"Unknown path {request.path[:200]}.")
    except web.HTTPMethodNotAllowed as refusal:
        allowed = ", ".join(sorted(refusal.allowed_methods))
        error = ClientError(
            405, f"Use {allowed} for {request.path[:200]}.", headers={"Allow": allowed}
        )
    except web.RequestPayloadError:
        error = ClientError(400, "The body is not what its headers say.")
    except web.HTTPException:
        raise
    except Exception:
        if request.writer.output_size > 0:
            raise  # the server cuts the connection: nothing else can be said any more
        logger.exception("[%s] a fault of the router", named[:LOGGED])
        error = ClientError(500, "The router has failed; its log says why.")
    response = error.response(request.path)
    response.headers[REQUEST_ID] = named
    return response


def make_app(router: Router) -> web.Application:
    """The aiohttp application of a router."""
    traced: list[Middleware] = [] if router.tracing is None else [router.tracing.trace]
    app = web.Application(
        middlewares=[*traced, openai_errors, router.access.guard],
        client_max_size=router.options.max_body,
    )
    app.cleanup_ctx.append(router.lifespan)
    app.on_response_prepare.append(router.count)
    generate, side_call = map(router.draining.admit, (router.generate, router.side_call))
    for path in APIS:
        app.router.add_post(path, generate)
    for path in GET:
        app.router.add_get(path, side_call)
    for path in POST:
        app.router.add_post(path, side_call)
    # An id may hold a slash.
    app.router.add_delete("/conversations/{id:.+}", router.end_conversation)
    app.router.add_get("/conversations/{id:.+}", router.show_conversation)
    app.router.add_get("/version", router.show_version)
    app.router.add_get("/", router.show_page)
    app.router.add_get("/status", router.show_status)
    app.router.add_get(openapi.PATH, router.show_openapi)
    app.router.add_get("/health", router.health)
    app.router.add_get("/ready", router.ready)
    app.router.add_get("/metrics", router.show_metrics)
    return app
