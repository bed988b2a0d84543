"""Changes of runs as server-sent events. Nothing is looked at while no page is open."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from kedge.board.catalogue import Catalogue

PERIOD_S = 1.0  # between two looks
MAX_SHARE = 0.2  # of the time, spent on looking
PING_S = 15.0  # of silence, after which a comment is sent: a page that is gone is noticed


def dumped(value: Any) -> bytes:
    """Plain data as JSON in ASCII, whatever the names of runs are."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


class Live:
    """Looks at the runs once for all pages that are open, and tells each of them what changed."""

    def __init__(self, catalogue: Catalogue, period: float = PERIOD_S) -> None:
        self.catalogue, self.period = catalogue, period
        self.looks = 0
        self._pages: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def stream(self) -> AsyncIterator[bytes]:
        """All runs, then what changes, until the page or the board closes."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        await self._look()
        self._pages.add(queue)
        try:
            rows = await asyncio.to_thread(self.catalogue.rows)
            head = {"title": self.catalogue.title, "cut": self.catalogue.is_cut}
            yield _event("all", head | {"rows": rows, "now": time.time()})
            if self._task is None:
                self._task = asyncio.create_task(self._watch())
            while not self._closed:
                try:
                    message = await asyncio.wait_for(queue.get(), PING_S)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if message is None:
                    return
                yield message
        finally:
            self._pages.discard(queue)
            if not self._pages and self._task is not None:
                self._task.cancel()
                self._task = None

    async def look(self) -> None:
        """Look now, and tell all pages."""
        await self._look()

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for queue in self._pages:
            queue.put_nowait(None)

    async def _watch(self) -> None:
        spent = 0.0
        while True:
            await asyncio.sleep(max(self.period, spent * (1 / MAX_SHARE - 1)))
            begin = time.perf_counter()
            await self._look()
            spent = time.perf_counter() - begin

    async def _look(self) -> None:
        rows, gone = await asyncio.to_thread(self.catalogue.refresh)
        self.looks += 1
        if rows or gone:
            message = _event("change", {"rows": rows, "gone": gone, "now": time.time()})
            for queue in self._pages:
                queue.put_nowait(message)


def _event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), dumped(data))
