# SPDX-License-Identifier: Apache-2.0
"""The router's Prometheus metrics. Labels never carry ids.

What has failed is counted here, and noted among the last errors with the node that it was on.

What each turn counts is counted in tallies, what is rare in prometheus_client's own metrics.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.samples import Sample
from vllm.bidir.reasons import Reason
from vllm.bidir.router.telemetry.last_errors import LastErrors
from vllm.bidir.router.telemetry.last_minutes import LastMinutes
from vllm.bidir.router.telemetry.tallies import Durations, Tally

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TURN_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_CALL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """One set per router, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.last_errors = LastErrors()
        self.last_minutes = LastMinutes()
        self._turns = Tally(
            "bidir_router_turns",
            "Turns by what the conversation cache gave (hit, miss) and why it was a miss.",
            ["outcome", "reason"],
            self.registry,
        )
        self._bypassed = Counter(
            "bidir_router_decode_alone",
            "Turns that a decode node served without a prefill node, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._failures = Counter(
            "bidir_router_leg_failures",
            "Legs that failed on a node, by leg and kind.",
            ["leg", "kind"],
            registry=self.registry,
        )
        self._withheld = Counter(
            "bidir_router_withheld",
            "Turns whose kept KV was not offered, because the prefill node does not verify it.",
            registry=self.registry,
        )
        self._identified = Tally(
            "bidir_router_identified",
            "Turns by what said which conversation they belong to "
            "(body, header, previous_response, history, none).",
            ["by"],
            self.registry,
        )
        self._params_dropped = Counter(
            "bidir_router_params_dropped",
            "kv_transfer_params of a node that name another side channel than its own, or another "
            "node's engine, by leg.",
            ["leg"],
            registry=self.registry,
        )
        self._hosts_replaced = Tally(
            "bidir_router_hosts_replaced",
            "kv_transfer_params of a node that name another host than the one under which the "
            "router has others reach its side channel, by leg.",
            ["leg"],
            self.registry,
        )
        self.prefill_seconds = Durations(
            "bidir_router_prefill_seconds",
            "Prefill leg, from sending the request to P's answer.",
            _SECONDS,
            self.registry,
        )
        self.decode_first_byte_seconds = Durations(
            "bidir_router_decode_first_byte_seconds",
            "Decode leg, from sending the request to the first byte of D's stream.",
            _SECONDS,
            self.registry,
        )
        self.first_byte_seconds = Durations(
            "bidir_router_first_byte_seconds",
            "From a turn's arrival to the first byte of its stream, by outcome (hit, miss).",
            _SECONDS,
            self.registry,
            "outcome",
        )
        self.turn_seconds = Durations(
            "bidir_router_turn_seconds",
            "From a turn's arrival to the end of its answer, by outcome (hit, miss).",
            _TURN_SECONDS,
            self.registry,
            "outcome",
        )
        self._prompt_tokens = Tally(
            "bidir_router_prompt_tokens",
            "Prompt tokens of prefill legs as P counts them: reused (read back, or in P's own "
            "prefix cache) and computed.",
            ["kind"],
            self.registry,
        )
        self._answers = Tally(
            "bidir_router_answers",
            "Answers to clients, by route and HTTP status.",
            ["route", "status"],
            self.registry,
        )
        self.queue_seconds = Histogram(
            "bidir_router_queue_seconds",
            "How long turns waited for a node with room, of those that had to wait.",
            ["role"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._refused = Counter(
            "bidir_router_refused",
            "Turns refused for want of room, by reason (queue_full: 429, queue_timeout: 503), or "
            "because the router is ending (draining: 503).",
            ["role", "reason"],
            registry=self.registry,
        )
        self._retries = Counter(
            "bidir_router_retries",
            "Legs that were tried again on another node of this role.",
            ["role"],
            registry=self.registry,
        )
        self._ejections = Counter(
            "bidir_router_ejections",
            "Nodes given no turns for a while, because several in a row had failed there.",
            ["role"],
            registry=self.registry,
        )
        self._node_list_errors = Counter(
            "bidir_router_node_list_errors",
            "Times that the file of nodes could not be used or a name could not be resolved.",
            registry=self.registry,
        )
        self.key_file_errors = Counter(
            "bidir_router_key_file_errors",
            "Times that a changed file of API keys, or of the server's certificate, could not be "
            "used; what there was stayed.",
            registry=self.registry,
        )
        self.conversations = Gauge(
            "bidir_router_conversations",
            "Conversations whose last turn is remembered.",
            registry=self.registry,
        )
        self.params_bytes = Gauge(
            "bidir_router_params_bytes",
            "Memory that the kv_transfer_params at hand take (--max-kept-params).",
            registry=self.registry,
        )
        self._recalled = Counter(
            "bidir_router_params_asked",
            "Turns for which the decode node was asked for the params of the turn before, since "
            "they were not at hand, by outcome (found, or why not).",
            ["outcome"],
            registry=self.registry,
        )
        self.state_up = Gauge(
            "bidir_router_state_up",
            "1 while the state that routers share can be used, or there is none; 0: this router "
            "goes by its own memory.",
            registry=self.registry,
        )
        self.state_up.set(1)
        self._state_failures = Counter(
            "bidir_router_state_failures",
            "Uses of the shared state that came to nothing, by kind (timeout, connection, skipped "
            "while it is away, refused by Redis, value: what was found is none).",
            ["kind"],
            registry=self.registry,
        )
        self.state_seconds = Histogram(
            "bidir_router_state_seconds",
            "What a use of the shared state took, before a turn or after it.",
            buckets=_CALL_SECONDS,
            registry=self.registry,
        )
        self.taken_over = Counter(
            "bidir_router_taken_over",
            "Turns whose last turn another router has served.",
            registry=self.registry,
        )
        self.leases = Gauge(
            "bidir_router_leases",
            "Leases of decode nodes that are being renewed.",
            registry=self.registry,
        )
        self.renewals = Counter(
            "bidir_router_lease_renewals",
            "Leases that a decode node has prolonged.",
            registry=self.registry,
        )
        self.lost = Counter(
            "bidir_router_leases_lost",
            "Leases that were to be renewed and that the decode node had no longer.",
            registry=self.registry,
        )
        self._released = Tally(
            "bidir_router_lease_releases",
            "Leases given back, by reason.",
            ["reason"],
            self.registry,
        )
        self._lease_call_failures = Counter(
            "bidir_router_lease_call_failures",
            "Lease calls that a decode node did not answer, by call (renew, release).",
            ["call"],
            registry=self.registry,
        )
        self.heartbeat_seconds = Histogram(
            "bidir_router_heartbeat_seconds",
            "Renewing all leases of one decode node.",
            buckets=_CALL_SECONDS,
            registry=self.registry,
        )

    def hit(self) -> None:
        self._turns.count("hit", "")
        self.last_minutes.count("hit")

    def miss(self, reason: Reason) -> None:
        self._turns.count("miss", reason.value)
        self.last_minutes.count(reason.value)

    def turns(self) -> dict[str, int]:
        """Turns since the start, by the reason of the miss, or "hit"."""
        return {reason or "hit": number for (_, reason), number in self._turns.by_labels.items()}

    def decode_alone_by_reason(self) -> dict[str, int]:
        return {sample.labels["reason"]: int(sample.value) for sample in _totals(self._bypassed)}

    def identified(self, by: str) -> None:
        self._identified.count(by)

    def decode_alone(self, reason: Reason) -> None:
        self._bypassed.labels(reason.value).inc()

    def withheld(self) -> None:
        self._withheld.inc()

    def prompt_tokens(self, total: int | None, cached: int | None) -> None:
        """What P says of a prompt; nothing is counted unless it says both, and they fit."""
        if total is not None and cached is not None and 0 <= cached <= total:
            self._prompt_tokens.count("reused", by=cached)
            self._prompt_tokens.count("computed", by=total - cached)

    def answered(self, route: str, status: int) -> None:
        """`route` is one of ours, not what a client has asked for."""
        self._answers.count(route, str(status))
        if status >= 500:
            self.last_errors.note(f"answer to {route}", "", str(status))

    def host_replaced(self, leg: str) -> None:
        self._hosts_replaced.count(leg)

    def params_dropped(self, leg: str, node: str) -> None:
        self._params_dropped.labels(leg).inc()
        self.last_errors.note(f"{leg} params", node, "another side channel")

    def failure(self, leg: str, node: str, kind: str) -> None:
        self._failures.labels(leg, kind).inc()
        self.last_errors.note(f"{leg} leg", node, kind)

    def refused(self, role: str, reason: str) -> None:
        self._refused.labels(role, reason).inc()
        self.last_errors.note(f"{role} queue", "", reason)

    def retried(self, role: str) -> None:
        self._retries.labels(role).inc()

    def ejected(self, role: str, node: str) -> None:
        self._ejections.labels(role).inc()
        self.last_errors.note(f"{role} node", node, "ejected")

    def node_list_error(self, source: str) -> None:
        """`source`: "file", or the name that cannot be resolved."""
        self._node_list_errors.inc()
        self.last_errors.note("node list", source, "not usable")

    def recalled(self, outcome: str) -> None:
        self._recalled.labels(outcome).inc()

    def state_failure(self, kind: str) -> None:
        self._state_failures.labels(kind).inc()

    def released(self, reason: str) -> None:
        self._released.count(reason)

    def lease_call_failure(self, call: str, node: str, kind: str) -> None:
        self._lease_call_failures.labels(call).inc()
        self.last_errors.note(f"lease {call}", node, kind)


def _totals(counter: Counter) -> list[Sample]:
    (family,) = counter.collect()
    return [sample for sample in family.samples if sample.name.endswith("_total")]
