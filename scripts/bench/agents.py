"""How many agents can talk to the model at once through the sessions of one environment worker?

Real sockets and JSON, without a model: every answer comes after a fixed wait. What is left is the time of the sessions and of
this script's own clients, which share one process. The ceiling is `turns` times the wait.

    uv run python scripts/bench/agents.py [--sessions 500] [--turns 4] [--wait-s 1.0]

The last line is one JSON object.
"""

import argparse
import asyncio
import json
import resource
import time
from collections.abc import Sequence
from typing import Any

import httpx
from training import hardware

from trivet.environments.apis.agents.formats import ModelRequest
from trivet.environments.apis.agents.server import serve_agents
from trivet.environments.apis.agents.session import AgentSession, SessionLimits

NUM_TOKENS = 64


async def measure(num_sessions: int, num_turns: int, wait_s: float) -> dict[str, Any]:
    """Have every session ask its turns, all sessions at once; return the numbers."""

    async def complete(request: ModelRequest, number: int, known: Sequence[int]) -> dict[str, Any]:
        await asyncio.sleep(wait_s)
        tokens = list(range(NUM_TOKENS))
        choice = {
            "message": {"role": "assistant", "content": "word " * NUM_TOKENS},
            "finish_reason": "stop",
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": -0.5}] * NUM_TOKENS},
            "policy_versions": [[0, NUM_TOKENS]],
        }
        return {"model": "m", "prompt_token_ids": [*known, 1], "choices": [choice]}

    async def play(address: str, session: AgentSession) -> None:
        # Each session has a client of its own, as an agent has: the pool of one client is searched for every request.
        async with httpx.AsyncClient(timeout=600, verify=False) as http:
            await ask(http, address, session)

    async def ask(http: httpx.AsyncClient, address: str, session: AgentSession) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
        headers = {"Authorization": f"Bearer {session.key}"}
        for _ in range(num_turns):
            answer = await http.post(f"{address}/v1/chat/completions", json={"messages": messages}, headers=headers)
            messages += [answer.raise_for_status().json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
        (await http.post(f"{address}/reward", json=1.0, headers=headers)).raise_for_status()

    async with serve_agents("127.0.0.1", model="m") as server:
        sessions = [AgentSession(complete, SessionLimits()) for _ in range(num_sessions)]
        addresses = [server.open(session) for session in sessions]
        started = time.monotonic()
        await asyncio.gather(*(play(address, session) for address, session in zip(addresses, sessions, strict=True)))
        seconds = time.monotonic() - started
    assert all(len(session.delivered()) == num_turns and session.reward == 1.0 for session in sessions)
    return {
        "bench": "agents",
        "sessions": num_sessions,
        "turns": num_turns,
        "seconds": round(seconds, 2),
        "ceiling_s": num_turns * wait_s,
        "turns_per_s": round(num_sessions * num_turns / seconds, 1),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "hardware": hardware(),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--wait-s", type=float, default=1.0)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args.sessions, args.turns, args.wait_s))))


if __name__ == "__main__":
    main()
