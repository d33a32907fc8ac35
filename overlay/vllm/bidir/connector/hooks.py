# SPDX-License-Identifier: Apache-2.0
"""What patches of the base call: one line there, the decision here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.bidir.connector.lease_calls import call_leases, no_leases
from vllm.bidir.connector.options import LEASE, is_on, read_options
from vllm.bidir.connector.peers import OPTION, check_host, check_shape
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.interface import PauseState

if TYPE_CHECKING:
    from vllm.bidir.connector.rest import Rest
    from vllm.bidir.connector.scheduler import BidirScheduler
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def select_connector(connector_cls: Any, kv_transfer_config: KVTransferConfig) -> Any:
    """Our connector for NixlConnector with `bidirectional_kv_xfer`; else the one chosen."""
    if kv_transfer_config.kv_connector == "NixlPushConnector" and is_on(kv_transfer_config):
        read_options(kv_transfer_config)  # says why not
    if kv_transfer_config.kv_connector not in ("NixlConnector", "NixlPullConnector"):
        if any(LEASE in extra for extra in nixl_configs(kv_transfer_config)):
            raise ValueError(
                f"{LEASE} needs NixlConnector to be the only KV connector: beside others blocks "
                "are freed when all have let go, and no lease could end. Leave it out here."
            )
        return connector_cls
    if not is_on(kv_transfer_config):
        return connector_cls
    from vllm.bidir.connector.connector import BidirConnector
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # MultiConnector finds its children's metrics by the name of their class.
    name = BidirConnector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, BidirConnector.__module__, name)
    return BidirConnector


def preferred_layout(vllm_config: VllmConfig, required: str | None) -> str | None:
    """The KV cache layout to ask for, given what the connector's class requires."""
    from vllm.bidir.connector import layout

    return layout.preferred(vllm_config, required)


def place_new_blocks(scheduler: Any, request: Request, num_external_tokens: int) -> None:
    """Let the blocks that something is to be read into lie as the peer's do; see placing.py.

    Before any connector is told of them.
    """
    ours = our_scheduler(scheduler.connector)
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    if ours is not None and num_external_tokens > 0 and len(managers) == 1:
        ours.place(request, managers[0].req_to_blocks[request.request_id], num_external_tokens)


def end_kept_turns(scheduler: Any) -> None:
    """What blocks hold is about to lose its meaning (reset, pause, new weights).

    No reader may be told that a turn stands, and its blocks are free at once: so that the reset
    succeeds. Beside other connectors they stay until all have let go. No-op without our connector.
    """
    ours = our_scheduler(scheduler.connector)
    if ours is None:
        return
    if not _is_alone(scheduler.connector, ours):
        ours.kept.end_all()
        return
    _free(scheduler, ours.end_kept_turns())


def free_ended_leases(scheduler: Any) -> None:
    """At the start of a step: blocks of leases that are over go back to the pool.

    An engine that pauses, or drains before it ends, keeps nothing of what finishes meanwhile: it
    would wait for that as for work, as long as somebody renews.
    """
    ours = our_scheduler(scheduler.connector)
    if ours is None or not len(ours.kept):
        return
    if scheduler.pause_state is not PauseState.UNPAUSED or ours.rest.stopped:
        end_kept_turns(scheduler)
    else:
        _free(scheduler, ours.leases_over())


def reclaim_leases(scheduler: Any, tokens: int, waits: bool = False) -> bool:
    """Whether leases have made room where `tokens` of a request find too few blocks.

    Asked before anything is preempted, and before a request has to wait (`waits`). For one that
    would have to wait all the same none ends; nor where blocks are about to come back by
    themselves, from requests whose last step is still under way.
    """
    ours = our_scheduler(scheduler.connector)
    if ours is None or not ours.kept.leased or scheduler.deferred_frees:
        return False
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    missing = max(1, -(-tokens // ours.block_size) - free)
    if waits and not scheduler.scheduler_reserve_full_isl:
        missing = 1  # it may begin with a part of its prompt, whose size is not known here
    if waits and missing > ours.kept.reclaimable():
        return False
    _free(scheduler, ours.reclaim(missing))
    return bool(pool.get_num_free_blocks() > free)


def kv_leases(scheduler: Any, word: str, lease_ids: list[str]) -> dict[str, Any]:
    """A call about leases that the server passes on; see lease_calls.py."""
    ours = our_scheduler(scheduler.connector)
    if ours is None:
        return no_leases(word, lease_ids)
    answer, ended = call_leases(ours, word, lease_ids)
    if _is_alone(scheduler.connector, ours):
        _free(scheduler, ours.ended(ended))
    return {**answer, "totals": ours.totals()}


def _free(scheduler: Any, request_ids: list[str]) -> None:
    for request_id in request_ids:
        scheduler._free_blocks(scheduler.requests[request_id])


def weights_changed(scheduler: Any, weight_version: str) -> None:
    """The engine's weights have been updated in place; a no-op for other connectors."""
    ours = our_scheduler(scheduler.connector)
    if ours is not None:
        end_kept_turns(scheduler)
        ours.weights_changed(weight_version)


def recomputes_failed_load(connector: Any, request: Request) -> bool:
    """Whether a failed load of this request is a lost read-back of our connector.

    Reading back is an optimisation: whatever `kv_load_failure_policy` says about loads that a
    request depends on, a turn is never worse off for having tried it.
    """
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_decode")) and our_scheduler(connector) is not None


def told_by_read(worker: Any, request_id: str, rank: int, notice: bytes) -> bytes:
    """What NIXL is to tell P's rank with the last byte of a READ of the base's; b"": nothing.

    Our worker tells P that it may free the blocks when the load counts.
    """
    ours = getattr(worker, "_told_by_read", None)
    return notice if ours is None else ours(request_id, rank, notice) or b""


def failed_loads(scheduler: Any, output: KVConnectorOutput) -> set[str]:
    """Requests that end with an error since what was to be loaded for them has not been; others
    that have failed so are computed. See failed_loads.py."""
    ours = our_scheduler(scheduler.connector)
    failed = set() if ours is None else ours.failed_loads.over(output)
    if not failed:
        return failed
    from vllm.bidir.connector.failed_loads import settle

    return settle(
        scheduler, failed, lambda request: recomputes_failed_load(scheduler.connector, request)
    )


def our_scheduler(connector: Any) -> BidirScheduler | None:
    """The scheduler's side of our connector, also when it is one of several."""
    ours = sys.modules.get("vllm.bidir.connector.scheduler")
    if ours is None:
        return None  # no engine of this process has it
    several = getattr(connector, "_connectors", None)
    for one in (connector, *(several if isinstance(several, list) else ())):
        scheduler = getattr(one, "connector_scheduler", None)
        if isinstance(scheduler, ours.BidirScheduler):
            return scheduler
    return None


def _is_alone(connector: Any, ours: BidirScheduler) -> bool:
    """Whether no other connector has a say in when blocks go."""
    return getattr(connector, "connector_scheduler", None) is ours


def recomputes_elsewhere(connector: Any, request: Request) -> bool:
    """Whether a failed load's own blocks must not be used to compute its tokens.

    A READ that was given up may still write into them.
    """
    ours = our_scheduler(connector)
    return ours is not None and ours.recomputes_elsewhere(request.request_id)


def loads_kv(connector: Any, config: KVTransferConfig) -> bool:
    """Whether loads fill blocks of this engine, unordered against a step that still runs."""
    return config.is_kv_consumer or our_scheduler(connector) is not None


def resting_requests(scheduler: Any) -> int:
    """How many finished requests only wait for their reader, and need no step of the engine.

    A pause is complete when nobody reads any more: while one is asked for they are work, as in the
    base. So they are beside other connectors: what those are about to do is theirs to know.
    """
    rest = _rest(scheduler)
    if rest is None or scheduler.pause_state is not PauseState.UNPAUSED:
        return 0
    return len(rest)


def idle_seconds(scheduler: Any) -> float | None:
    """How long an engine without work may wait for a request; None: as long as it takes."""
    rest = _rest(scheduler)
    return None if rest is None else rest.seconds_left()


def stop_resting(scheduler: Any) -> None:
    """The engine drains before it ends: readers of handovers are waited for, kept turns are not."""
    end_kept_turns(scheduler)
    rest = _rest(scheduler)
    if rest is not None:
        rest.stop()


def _rest(scheduler: Any) -> Rest | None:
    connector = getattr(scheduler, "connector", None)
    ours = our_scheduler(connector)
    return ours.rest if ours is not None and _is_alone(connector, ours) else None


def check_kv_peers(vllm_config: VllmConfig, params: SamplingParams) -> None:
    """`check_kv_transfer_params` for a request's sampling parameters."""
    transfer = (params.extra_args or {}).get("kv_transfer_params")
    if transfer is not None:
        check_kv_transfer_params(vllm_config, transfer)


def check_kv_transfer_params(vllm_config: VllmConfig, transfer: object) -> None:
    """Refuse params that are malformed, or name a host outside the option `kv_peers`.

    Behind this point the engine core reads them without a net. Raises VLLMValidationError, the
    only kind of error that the server answers with 400.
    """
    configs = list(nixl_configs(vllm_config.kv_transfer_config))
    if not configs:
        return  # other connectors have params of their own
    try:
        check_shape(transfer)
        assert isinstance(transfer, dict)  # as just checked
        for extra in configs:
            check_host(extra.get(OPTION), transfer.get("remote_host"))
    except ValueError as error:
        raise VLLMValidationError(str(error)) from error


def nixl_configs(config: KVTransferConfig | None) -> Iterator[dict[str, Any]]:
    """The extra configuration of each NIXL connector, also of those within a MultiConnector."""
    if config is None:
        return
    extra: dict[str, Any] = config.kv_connector_extra_config or {}
    if (config.kv_connector or "").startswith("Nixl"):
        yield extra
    for child in extra.get("connectors", ()):
        if isinstance(child, dict) and str(child.get("kv_connector", "")).startswith("Nixl"):
            yield child.get("kv_connector_extra_config") or {}
