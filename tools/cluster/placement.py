"""Which cores or which GPUs each engine gets."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.cluster.errors import ClusterError

# An engine has three busy processes at most (API server, EngineCore, worker); more cores than
# that would only widen the differences between machines.
_MOST_CORES_PER_RANK = 4


@dataclass(frozen=True)
class Slot:
    """Where one engine runs. ``sharers``: engines, itself included, that use the same slot.

    ``wave``: engines of one wave start together, the next wave when they are up, so that
    engines that share a slot do not starve each other during start-up.
    """

    cores: tuple[int, ...] | None = None
    gpus: tuple[int, ...] = ()
    sharers: int = 1
    wave: int = 0


def cpu_slots(engines: int, ranks: int, cores: Sequence[int] | None = None) -> list[Slot]:
    """Slots for ``engines`` engines of ``ranks`` tensor-parallel ranks each.

    Every engine gets cores of its own, at least one per rank, while there are enough; after
    that they go round again. ``cores`` defaults to those that this process may use.
    """
    available = sorted(os.sched_getaffinity(0) if cores is None else cores)
    share = len(available) // max(engines, 1)
    size = min(len(available), max(ranks, min(share, ranks * _MOST_CORES_PER_RANK)))
    places = _groups(available, size)
    return [
        Slot(cores=places[i % len(places)], sharers=sharers, wave=wave)
        for i, sharers, wave in _rounds(engines, len(places))
    ]


def gpu_slots(engines: int, ranks: int, gpus: Sequence[int]) -> list[Slot]:
    """As cpu_slots, with one GPU per rank; raises ClusterError when one engine has too few."""
    if ranks > len(gpus):
        raise ClusterError(
            f"tensor_parallel={ranks} needs {ranks} GPUs, found {len(gpus)} {list(gpus)}; "
            "lower tensor_parallel or widen CUDA_VISIBLE_DEVICES"
        )
    places = _groups(gpus, ranks)
    return [
        Slot(gpus=places[i % len(places)], sharers=sharers, wave=wave)
        for i, sharers, wave in _rounds(engines, len(places))
    ]


def visible_gpus(env: Mapping[str, str] | None = None) -> list[int]:
    """Indexes of the GPUs that may be used: CUDA_VISIBLE_DEVICES if set, else all there are."""
    visible = (os.environ if env is None else env).get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
        if not all(entry.isdigit() for entry in entries):
            raise ClusterError(
                f"CUDA_VISIBLE_DEVICES={visible!r}: expected indexes such as 0,1; "
                "set it to the indexes that nvidia-smi -L shows"
            )
        return [int(entry) for entry in entries]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(
            f'device="cuda": nvidia-smi -L failed ({error}); use device="cpu" on this machine'
        ) from error
    return list(range(sum(line.startswith("GPU ") for line in listed.splitlines())))


def _groups(units: Sequence[int], size: int) -> list[tuple[int, ...]]:
    whole = len(units) // size
    return [tuple(units[i * size : (i + 1) * size]) for i in range(whole)]


def _rounds(engines: int, places: int) -> list[tuple[int, int, int]]:
    """(engine, engines on its place, wave) for engines that go round the places."""
    return [(i, len(range(i % places, engines, places)), i // places) for i in range(engines)]
