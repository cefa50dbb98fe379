"""Obedient servers for tests of the dispatcher and the policy watcher."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from trivet.client.server import TargetPolicy


class FakeServers:
    def __init__(self, *roots: str) -> None:
        self.roots = list(roots or ("http://server",))
        self.in_flight: Counter[str] = Counter()
        self.at_fault: set[str] = set()
        """Servers that do not answer."""
        self.loaded: list[TargetPolicy] = []
        self.sources: list[str] = []

    def pick(self, *, num_rollouts: int) -> str | None:
        if not self.roots:
            return None
        root = min(self.roots, key=lambda root: self.in_flight[root])
        self.in_flight[root] += num_rollouts
        return root

    def release(self, root: str, *, num_rollouts: int) -> None:
        self.in_flight[root] -= num_rollouts

    async def is_at_fault(self, root: str) -> bool:
        return root in self.at_fault

    def subscribe(self, *, on_down: Callable[[str], None], on_up: Callable[[], None]) -> None:
        pass  # none of them comes or goes by itself

    async def ensure_policy_on_all(self, policy: TargetPolicy, *, reset: bool = True) -> TargetPolicy:
        self.loaded.append(policy)
        return replace(policy, digest=policy.digest or "start")

    async def ensure_policy(self, policy: TargetPolicy) -> None:
        self.loaded.append(policy)
