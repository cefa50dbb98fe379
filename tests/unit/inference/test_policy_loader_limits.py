"""Test that nothing else that changes the engine keeps the policy loader waiting without end."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from trivet.errors import InferenceError
from trivet.inference.policy_loader import PolicyLoader


def test_a_change_that_the_engine_never_ends_is_reported_broken(tmp_path: Path) -> None:
    broken: list[str] = []
    engine: Any = object()  # the block below stands for what hangs in it

    async def main() -> None:
        loader = PolicyLoader(
            engine,
            model_name="m",
            start_directory=tmp_path,
            roots=[tmp_path],
            on_broken=lambda: broken.append("broken"),
            timeout_s=0.01,
        )
        with pytest.raises(InferenceError, match="did not answer within 0 s: the server ends"):
            async with loader.keep_awake():
                await asyncio.sleep(60)

    asyncio.run(main())
    assert broken == ["broken"]
