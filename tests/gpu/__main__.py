"""Is verified read-back right on this GPU? Starts P and D on one GPU, and compares.

    python -m tests.gpu --model mla --out results

Runs the vllm of this Python and needs no network. Checks that the tokens read are those that the
histories allow, that the answer after a read-back is that of a plain recompute, that what was
filed in prefix caches is, and that wrong KV shows.
Exit status: 0 right, 1 something is wrong, 2 an engine failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.gpu.client import EngineError, decisions
from tests.gpu.histories import ROWS, random_conversations, row_conversations
from tests.gpu.measure import Measured, Servers, measure, meet
from tests.gpu.shapes import SHAPES, Shape, write_model
from tests.gpu.verdict import Verdict, as_json, judge, table
from tools.bench.gpu.engines import telling
from tools.cluster import Cluster, ClusterOptions, ProcessFailedError, RoleOptions, cluster

PLUGIN = Path(__file__).parent / "plugin"
_TTL_S = 60


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[options.model]
    model = write_model(out / "model", shape)
    begin = time.monotonic()
    cases: list[Measured] = []
    errors: list[str] = []
    about: dict[str, Any] = _machine(options, shape)
    try:
        with _servers(options, shape, model, out / "logs") as (servers, clusters):
            about["ready_s"] = round(time.monotonic() - begin, 1)
            print(f"{options.model}: engines ready after {about['ready_s']} s", flush=True)
            _run(options, servers, cases, errors, begin)
            about["decisions"] = decisions(servers.prefill)
            about["log"] = [line for one in clusters for line in telling(one.engines)]
            about["seconds"] = round(time.monotonic() - begin, 1)
    except ProcessFailedError as error:
        print(error, flush=True)
        errors.append(str(error)[-4000:])
    wanted = options.random + len(ROWS)
    verdict = judge(cases, wanted) if cases else Verdict(0.0, ("nothing was measured",))
    path = out / f"{options.model}.json"
    path.write_text(as_json(cases, verdict, about, errors), encoding="utf-8")
    if cases:
        print("\n".join([f"== {options.model}", *table(cases, verdict)]))
    print("\n".join([*verdict.problems, *errors]) or "nothing is wrong")
    print(f"{path}: {about.get('seconds')} s, {about.get('decisions')}", flush=True)
    if errors:
        return 2
    return 1 if verdict.problems else 0


def _run(
    options: argparse.Namespace,
    servers: Servers,
    cases: list[Measured],
    errors: list[str],
    begin: float,
) -> None:
    rng = random.Random(options.seed)
    try:
        meet(servers, rng)
    except EngineError as error:
        errors.append(str(error))
        return
    conversations = row_conversations(rng) + random_conversations(rng, options.random)
    for conversation in conversations:
        if time.monotonic() - begin > options.deadline:
            return
        try:
            cases.append(measure(conversation, servers, rng))
        except EngineError as error:
            errors.append(f"{conversation.name}: {error}")
            print(errors[-1], flush=True)
            if len(errors) >= 5:
                return


@contextmanager
def _servers(
    options: argparse.Namespace, shape: Shape, model: Path, logs: Path
) -> Iterator[tuple[Servers, list[Cluster]]]:
    """P and D, and for a control the base's own read-back as a second P."""
    common = ClusterOptions(
        model=model,
        served_model_name="m",
        dtype=shape.dtype,
        max_model_len=4096,
        kv_cache_gib=options.kv_gib,
        prefill=RoleOptions(prefix_caching=True),
        kv_connector_extra_config={"decoder_kv_blocks_ttl": _TTL_S},
        args=_engine_arguments(options, shape),
        env=_environment(options),
    )
    with ExitStack() as stack:
        pair = stack.enter_context(
            cluster(device=options.device, options=common, log_folder=logs / "pair")
        )
        clusters = [pair]
        if options.counting:
            config = {
                "kv_connector": "CountingConnector",
                "kv_connector_module_path": "counting_connector",
                "kv_role": "kv_producer",
                "engine_id": "counting",
                "kv_connector_extra_config": {"backends": ["UCX"], "bidirectional_kv_xfer": True},
            }
            if options.device == "cpu":
                config["kv_buffer_device"] = "cpu"
            role = RoleOptions(
                prefix_caching=False, args=("--kv-transfer-config", json.dumps(config))
            )
            counting = ClusterOptions(**{**vars(common), "prefill": role})
            clusters.append(
                stack.enter_context(
                    cluster(1, 0, 1, options.device, counting, log_folder=logs / "counting")
                )
            )
        yield (
            Servers(
                pair.prefill[0].url,
                pair.decode[0].url,
                clusters[1].prefill[0].url if options.counting else None,
            ),
            clusters,
        )


def _engine_arguments(options: argparse.Namespace, shape: Shape) -> tuple[str, ...]:
    args = ["--load-format", "dummy", "--max-num-seqs", "8", "--enable-prompt-tokens-details"]
    if options.device == "cuda":
        # Only looked at when the engine starts: how much it takes is said in bytes.
        args += ["--gpu-memory-utilization", "0.15"]
    if options.block_size:
        args += ["--block-size", str(options.block_size)]
    return (*args, *shape.args, *options.engine_args)


def _environment(options: argparse.Namespace) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH"))))
    env = {
        "PYTHONPATH": path,
        # For /reset_prefix_cache.
        "VLLM_SERVER_DEV_MODE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if options.device == "cuda":
        env |= {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "UCX_PROTO_INFO": "y"}
        env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return env


def _machine(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    about: dict[str, Any] = {
        "arguments": {
            name: value if isinstance(value, int | float | str | list | None) else str(value)
            for name, value in vars(options).items()
            if name != "out"
        },
        "shape": dict(shape.config),
        "dtype": shape.dtype,
    }
    for package in ("vllm", "torch", "nixl", "nixl-cu13", "triton", "transformers"):
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            about[package] = None
    if options.device == "cuda":
        query = "--query-gpu=name,driver_version,memory.total"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        about["gpu"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return about


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON and logs")
    parser.add_argument("--random", type=int, default=50, help="random conversations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--block-size", type=int, help="tokens; default: the engine's choice")
    parser.add_argument("--kv-gib", type=int, default=6, help="KV cache of each engine, GiB")
    parser.add_argument("--deadline", type=float, default=480, help="seconds for everything")
    parser.add_argument(
        "--no-counting", dest="counting", action="store_false", help="no control by token count"
    )
    parser.add_argument("engine_args", nargs="*", help="after --: more arguments of vllm serve")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
