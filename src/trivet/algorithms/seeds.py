"""Derives seeds from a run's seed, stable across processes, machines and Python versions."""

import hashlib


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a 63-bit seed that is a function of the run's seed and a path such as ("rollout", group_id, index)."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
