"""A headless Chromium over its DevTools protocol: what a page looks like, and what it complains of.

`python -m tests.router.chromium FOLDER [--whole]` draws the status page as phones and desktops show
it.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

BINARY = shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Page:
    """One tab. `complaints`: what it has logged, such as blocked resources and styles."""

    socket: aiohttp.ClientWebSocketResponse
    complaints: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self.socket.send_json({"id": number, "method": method, "params": params})
        return await self._until(lambda said: said.get("id") == number, method)

    async def open(self, url: str, width: int, height: int, scheme: str) -> None:
        """Load a page on a screen of this size in CSS pixels, `scheme` light or dark."""
        for domain in ("Page", "Log", "Runtime"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        await self.call("Page.navigate", url=url)
        await self._until(lambda said: said.get("method") == "Page.loadEventFired", url)

    async def width(self) -> float:
        """Of what there is to see; more than the screen's is to be scrolled sideways."""
        metrics = await self.call("Page.getLayoutMetrics")
        return float(metrics["cssContentSize"]["width"])

    async def picture(self, path: Path, whole: bool) -> None:
        """What the screen shows, or the `whole` page below it as well."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def _until(self, wanted: Any, what: str) -> dict[str, Any]:
        while True:
            said = await self.socket.receive_json(timeout=60)
            if said.get("method") == "Log.entryAdded":
                self.complaints.append(said["params"]["entry"]["text"])
            if wanted(said):
                if "error" in said:
                    raise RuntimeError(f"{what}: {said['error']}")
                result: dict[str, Any] = said.get("result", {})
                return result


@asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    """A browser with one tab, which ends with the block."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            BINARY,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(folder, "DevToolsActivePort"))
            async with aiohttp.ClientSession() as client:
                async with client.get(f"http://127.0.0.1:{port}/json/list") as response:
                    (tab,) = [one for one in await response.json() if one["type"] == "page"]
                async with client.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Page(socket)
                    await socket.send_json({"id": 0, "method": "Browser.close"})
        finally:
            try:
                await asyncio.wait_for(process.wait(), 10)
            except asyncio.TimeoutError:
                process.kill()
                await process.wait()


async def _port(path: Path) -> int:
    for _ in range(600):
        if path.exists() and (lines := path.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.1)
    raise TimeoutError("Chromium does not come up")


async def _draw(folder: Path, whole: bool) -> None:
    from tests.router.statuses import STATUSES, serving

    async with serving(STATUSES) as url, chromium() as page:
        for name in STATUSES:
            for width, height in ((390, 844), (1280, 800)):
                for scheme in ("light", "dark"):
                    await page.open(f"{url}/{name}", width, height, scheme)
                    assert await page.width() <= width
                    await page.picture(folder / f"{name}-{width}-{scheme}.png", whole)


if __name__ == "__main__":
    asyncio.run(_draw(Path(sys.argv[1]), whole="--whole" in sys.argv))
