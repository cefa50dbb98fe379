"""An event that one task waits for and others notify."""

import asyncio


class ChangeEvent:
    """An asyncio.Event that is cleared by the wait that it ends. A notification before the wait is kept, so none is lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """End the wait of the task that waits, or the next wait."""
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Return True when notified, False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True
