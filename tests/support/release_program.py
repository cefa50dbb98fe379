"""Plays every kind of environment with the release of verifiers that its interpreter has, and prints what came of it as JSON.

PYTHONPATH=src:tests:tests/support/environments PYTHON tests/support/release_program.py
"""

import asyncio
import json
import os
import sys

from support.character_server import CharacterServer
from trivet.environments.apis.load import load_host
from trivet.errors import RolloutFailed
from trivet.wire.groups import GroupRequest, SamplingArguments, ServerAccess
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import GroupId
from trivet.wire.workers import HostSettings

CALL = '<tool_call>add {"a": 2, "b": 3}'
ANSWERS = {"single": ["cba"], "multi": ["hm", "well", "cba"], "tools": [CALL, "cba"], "broken": ["x"]}


def play(kind: str) -> tuple[Rollout, CharacterServer]:
    """Play one rollout of the environment of a kind."""
    server = CharacterServer(ANSWERS[kind])
    with server.served_url() as url:
        settings = HostSettings(
            env_id="v0-toys",
            name="toy",
            args={"kind": kind},
            model_name="m",
            servers=ServerAccess(base_urls=[url], key_variables=["OPENAI_API_KEY"]),
            hash_keys=["task", "prompt"],
            rollout_timeout_s=60.0,
        )
        host = load_host(settings, environ=os.environ)
        assert host.info.num_examples == len(host.info.example_hashes) == 1
        request = GroupRequest(
            group_id=GroupId(1),
            env="toy",
            example_id=0,
            num_rollouts=1,
            base_url=url,
            sampling=SamplingArguments(temperature=1.0, seed=3, fields={"max_tokens": 16, "top_k": -1}),
        )

        async def scenario() -> Rollout:
            async with host.serving():
                [rollout] = await host.run_group(request)
                return rollout

        return asyncio.run(scenario()), server


def check(kind: str) -> None:
    """Require that the rollout has exactly the tokens of the server, in one sample, and the right reward.

    Raises:
        AssertionError: something differs.
    """
    rollout, server = play(kind)
    [sample] = rollout.samples
    tokens = [*server.read[-1], *server.sampled[-1]]
    assert sample.token_ids_T.tolist() == tokens, (sample.token_ids_T.tolist(), tokens)
    trained = [token for token, is_trained in zip(tokens, sample.loss_mask_T, strict=True) if is_trained]
    assert trained == [token for sampled in server.sampled for token in sampled]
    assert [run.version for run in sample.versions] == list(range(len(server.bodies)))
    assert (rollout.reward, rollout.scores["exact"], rollout.num_turns) == (1.0, 1.0, len(server.bodies))
    assert len({body["seed"] for body in server.bodies}) == len(server.bodies)
    assert all(body.get("known_token_ids") for body in server.bodies[1:])
    assert all(body["top_k"] == -1 and body["return_token_ids"] for body in server.bodies)
    if kind == "tools":
        assert [message["role"] for message in rollout.completion] == ["assistant", "tool", "assistant"]
        assert "5" in str(rollout.completion[1]["content"])


def main() -> None:
    """Print one object: the version of Python, and what each kind came to."""
    results: dict[str, str] = {}
    for kind in ("single", "multi", "tools"):
        try:
            check(kind)
            results[kind] = "ok"
        except Exception as exc:  # noqa: BLE001  the table names whatever went wrong
            results[kind] = f"{type(exc).__name__}: {exc}"[:300]
    try:
        play("broken")
        results["reward error"] = "not noticed"
    except RolloutFailed as exc:
        results["reward error"] = "ok" if exc.kind == "LookupError" else str(exc)
    print(json.dumps({"python": sys.version.split()[0], **results}))


if __name__ == "__main__":
    main()
