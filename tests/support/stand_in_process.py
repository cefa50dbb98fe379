"""A stand-in for a worker's process, which records signals with the loop's time."""

import asyncio


class StandInProcess:
    """Acts as an asyncio.subprocess.Process. `exit` ends it, as the kernel would."""

    pid = 4242

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.history: list[tuple[float, object]] = []
        self._exited = asyncio.Event()

    def exit(self, code: int) -> None:
        self.returncode = code
        self._exited.set()

    async def wait(self) -> int:
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.history.append((asyncio.get_running_loop().time(), number))

    def end_session(self, leader: int) -> None:
        assert leader == self.pid
        self.history.append((asyncio.get_running_loop().time(), "killed"))
        if self.returncode is None:
            self.exit(-9)
