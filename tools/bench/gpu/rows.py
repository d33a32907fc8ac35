"""One measured request, and what follows from its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tools.bench.gpu.counters import Transfer
from tools.bench.gpu.plan import Kind, SetName

# Parts of P's line that are words, not numbers.
_WORDS = ("req", "peer", "outcome", "reason")


@dataclass(frozen=True)
class Row:
    """A conversation's second turn. Times in ms; repeat -1 warms up, and is in no median.

    prefill_ms: P's leg. decode_ms: D's leg up to its first token. pull: what P read. handover: what
    D read in this turn; first_handover: in the first one, where P computed it. log: P's line about
    the read-back, numbers as numbers; ours only. first_contact: the set's first read-back of all.
    """

    set_name: SetName
    kind: Kind
    length: int
    repeat: int
    request_id: str = ""
    at_s: float = 0.0
    first_contact: bool = False
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    pull: Transfer | None = None
    handover: Transfer | None = None
    first_handover: Transfer | None = None
    log: Mapping[str, float | str] = field(default_factory=dict)
    error: str = ""

    @property
    def arm(self) -> str:
        return f"{self.set_name} {self.kind}"

    @property
    def counts(self) -> bool:
        """Whether it enters medians."""
        return self.repeat >= 0 and not self.error

    @property
    def ttft_ms(self) -> float:
        """Both legs; what a router does between them is not in it."""
        return self.prefill_ms + self.decode_ms

    @property
    def pull_ms(self) -> float | None:
        """From the order to read to the last byte: by P's log if it says so, else by its counters.

        None where nothing was read.
        """
        if self.pull is None or not self.pull.bytes:
            return None
        return self._logged("transfer_ms") or self.pull.transfer_ms

    @property
    def post_ms(self) -> float | None:
        """Of handing descriptors to NIXL, in whichever thread."""
        return self.pull.post_ms if self.pull is not None and self.pull.bytes else None

    @property
    def engine_ms(self) -> float | None:
        """That the engine's thread was busy with the read-back, and scheduled nothing.

        Ours says so in its log. Stock posts in that thread: it is its posting.
        """
        if self.pull_ms is None:
            return None
        return self._logged("engine_ms") if self.set_name == "ours" else self.post_ms

    @property
    def checks_ms(self) -> float | None:
        """HOLD and CONFIRM; None for stock, which has neither, and where nothing was read."""
        hold, confirm = self._logged("hold_ms"), self._logged("confirm_ms")
        return None if hold is None or confirm is None else hold + confirm

    @property
    def compute_ms(self) -> float:
        """What is left of the prefill: computing, scheduling, HTTP."""
        return max(0.0, self.prefill_ms - (self.pull_ms or 0.0) - (self.checks_ms or 0.0))

    @property
    def gb_per_s(self) -> float | None:
        """Of the pull."""
        if self.pull is None or not self.pull_ms:
            return None
        return self.pull.bytes / self.pull_ms / 1e6

    def as_json(self) -> dict[str, Any]:
        """All fields, and what follows from them."""
        made = asdict(self)
        for name in _DERIVED:
            value = getattr(self, name)
            made[name] = round(value, 3) if isinstance(value, float) else value
        return made

    def _logged(self, name: str) -> float | None:
        value = self.log.get(name)
        return value if isinstance(value, float) else None


_DERIVED = (
    "ttft_ms",
    "pull_ms",
    "post_ms",
    "engine_ms",
    "checks_ms",
    "compute_ms",
    "gb_per_s",
)


def from_json(made: Mapping[str, Any]) -> Row:
    """The row that `as_json` has made."""
    plain = {name: value for name, value in made.items() if name not in _DERIVED}
    for name in ("pull", "handover", "first_handover"):
        if plain[name] is not None:
            plain[name] = Transfer(**plain[name])
    return Row(**plain)


def numbers(fields: Mapping[str, str]) -> dict[str, float | str]:
    """P's line with its numbers as numbers."""
    found: dict[str, float | str] = {}
    for name, text in fields.items():
        try:
            found[name] = text if name in _WORDS else float(text)
        except ValueError:
            found[name] = text
    return found
