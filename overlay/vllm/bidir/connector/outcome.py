# SPDX-License-Identifier: Apache-2.0
"""What the workers tell the scheduler about transfers, and how several ranks' words add up."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.bidir.reasons import Reason
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclass(frozen=True)
class Outcome:
    """One rank's read-back, or that of all ranks: seconds, and MB (10^6 bytes) that were read.

    `engine_s`: of the engine's thread, which runs nothing else meanwhile. `lost` says why it was
    given up; None: all bytes are there and confirmed.
    """

    lost: Reason | None
    megabytes: float = 0.0
    hold_s: float = 0.0
    transfer_s: float = 0.0
    confirm_s: float = 0.0
    engine_s: float = 0.0

    def with_rank(self, other: Outcome) -> Outcome:
        """Both ranks: lost if one is, as slow as the slower."""
        return Outcome(
            self.lost or other.lost,
            self.megabytes + other.megabytes,
            max(self.hold_s, other.hold_s),
            max(self.transfer_s, other.transfer_s),
            max(self.confirm_s, other.confirm_s),
            max(self.engine_s, other.engine_s),
        )


@dataclass(frozen=True)
class LostHandover:
    """A prompt that was read of this peer and does not count, and why."""

    engine_id: str
    reason: Reason


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """News of one step: `outcomes` of finished read-backs; by how many the `writers` of a request
    have changed, which are ranks whose READ was given up and has not ended; handovers that are
    `lost`; loads that have `failed` and are over, where no block says so."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)
    lost: dict[str, LostHandover] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.outcomes or self.writers or self.lost or self.failed)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)  # all ranks run the same worker
        for request_id, outcome in other.outcomes.items():
            mine = self.outcomes.get(request_id)
            self.outcomes[request_id] = outcome if mine is None else mine.with_rank(outcome)
        for request_id, change in other.writers.items():
            self.writers[request_id] = self.writers.get(request_id, 0) + change
        self.lost |= other.lost
        self.failed |= other.failed
        return self
