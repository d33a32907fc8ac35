"""One vLLM engine: start, wait until it serves, stop, kill, restart."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from tools.cluster.command import EngineSpec, serve_command, serve_environment
from tools.cluster.errors import ClusterError
from tools.cluster.options import Role
from tools.cluster.process import ManagedProcess
from tools.cluster.readiness import Report, answers_health, to_stderr, wait_until_ready


class Engine:
    """An engine of a cluster. Its address stays the same over restarts."""

    def __init__(self, spec: EngineSpec, log_folder: Path, report: Report = to_stderr) -> None:
        self.spec = spec
        self.log_path = log_folder / f"{spec.name}.log"
        self.engine_id = self._new_engine_id()
        self._report = report
        self._process: ManagedProcess | None = None

    @property
    def name(self) -> str:
        """Role and index, such as ``decode-0``."""
        return self.spec.name

    @property
    def role(self) -> Role:
        """What it is used for; the engine itself can do both."""
        return self.spec.role

    @property
    def host(self) -> str:
        """Address of the API server and of the NIXL side channel."""
        return self.spec.options.host

    @property
    def port(self) -> int:
        """Port of the API server."""
        return self.spec.port

    @property
    def side_channel_port(self) -> int:
        """Port of the NIXL side channel (of the first data-parallel rank)."""
        return self.spec.side_channel_port

    @property
    def url(self) -> str:
        """``http://host:port`` of the API server, without a path."""
        return f"http://{self.host}:{self.port}"

    @property
    def model(self) -> str:
        """Name under which the model is served."""
        return self.spec.options.served_model_name

    @property
    def process(self) -> ManagedProcess:
        """The running process; ClusterError when it is not started."""
        if self._process is None:
            raise ClusterError(f"{self.name} is not started; call start() first")
        return self._process

    @property
    def pid(self) -> int:
        """Process id of the API server, also its process group's; ClusterError if not started."""
        return self.process.pid

    def start(self) -> None:
        """Start the process and return at once; ``wait`` waits until it serves."""
        if self._process is not None:
            raise ClusterError(f"{self.name} is started already; call stop() or kill() first")
        self._process = self._new_process()
        self._process.start()

    def wait(self) -> None:
        """Wait until /health answers; raises ProcessFailedError when it ends or takes too long."""
        wait_until_ready([self], self.spec.options.start_timeout_s, self._report)

    def is_alive(self) -> bool:
        """Whether the API server's process is running."""
        return self._process is not None and self._process.is_alive()

    def is_ready(self) -> bool:
        """Whether it serves; raises ProcessFailedError when the process has ended."""
        self.process.check_alive()
        return answers_health(self.host, self.port)

    def ask_to_stop(self) -> None:
        """Send SIGTERM and return at once; several engines then end at the same time."""
        if self._process is not None:
            self._process.ask_to_stop()

    def stop(self) -> None:
        """End it with all its processes: SIGTERM, after the grace SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def kill(self) -> None:
        """End it with all its processes at once (SIGKILL). Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def restart(self, *, keep_engine_id: bool = False) -> None:
        """Stop it if it runs, start it at the same address, and wait until it serves.

        A fresh engine gets a fresh id, as in vLLM when none is configured; ``keep_engine_id``
        is a deployment with fixed ids. The log goes on in the same file.
        """
        self.stop()
        if not keep_engine_id:
            self.engine_id = self._new_engine_id()
        self.start()
        self.wait()

    def _new_engine_id(self) -> str:
        return f"{self.spec.name}-{uuid.uuid4().hex[:12]}"

    def _new_process(self) -> ManagedProcess:
        return ManagedProcess(
            self.name,
            serve_command(self.spec, self.engine_id),
            self.log_path,
            env=serve_environment(self.spec, os.environ),
            cores=self.spec.slot.cores,
            grace_s=self.spec.options.grace_s,
        )
