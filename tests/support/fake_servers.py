"""Servers that do what they are told: for the dispatcher and the policy watcher."""

from collections import Counter
from dataclasses import replace

from trivet.client.server import TargetPolicy


class FakeServers:
    def __init__(self, *roots: str) -> None:
        self.roots = list(roots or ("http://server",))
        self.in_flight: Counter[str] = Counter()
        self.at_fault: set[str] = set()
        """Servers that turn out not to answer."""
        self.loaded: list[TargetPolicy] = []

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

    async def ensure_policy_on_all(self, policy: TargetPolicy, *, reset: bool = True) -> TargetPolicy:
        self.loaded.append(policy)
        return replace(policy, digest=policy.digest or "start")

    async def ensure_policy(self, policy: TargetPolicy) -> None:
        self.loaded.append(policy)
