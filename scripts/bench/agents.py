"""How many agents can talk to the model at once through the sessions of one environment worker?

Real sockets and JSON, without a model: a stand-in for the inference server, in a process of its own, answers every request after a
fixed wait. What is left is the time of the sessions, of their requests to the server and of this script's own clients, which share
one process. The ceiling is `turns` times the wait.

    uv run python scripts/bench/agents.py [--sessions 500] [--turns 4] [--wait-s 1.0]

The last line is one JSON object.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import time
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from training import hardware

from trivet.environments.apis.agents.completion_client import CompletionClient
from trivet.environments.apis.agents.server import AgentServer
from trivet.environments.apis.agents.session import AgentSession, SessionLimits
from trivet.wire.groups import SamplingArguments, ServerAccess
from trivet.wire.workers import HostSettings

NUM_TOKENS = 64


def serve_answers(sock: socket.socket, wait_s: float) -> None:
    """Serve chat completions that take `wait_s` each."""

    async def complete(request: Request) -> Response:
        known = (await request.json()).get("known_token_ids", [])
        await asyncio.sleep(wait_s)
        tokens = list(range(NUM_TOKENS))
        choice = {
            "message": {"role": "assistant", "content": "word " * NUM_TOKENS},
            "finish_reason": "stop",
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": -0.5}] * NUM_TOKENS},
            "policy_versions": [[0, NUM_TOKENS]],
        }
        return JSONResponse({"model": "m", "prompt_token_ids": [*known, 1], "choices": [choice]})

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False)).run(sockets=[sock])


async def play(address: str, session: AgentSession, num_turns: int) -> None:
    """Ask the turns of one session, and report its reward. Each session has a client of its own, as an agent has."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    headers = {"Authorization": f"Bearer {session.key}"}
    async with httpx.AsyncClient(timeout=600, verify=False) as http:
        for _ in range(num_turns):
            answer = await http.post(f"{address}/v1/chat/completions", json={"messages": messages}, headers=headers)
            messages += [answer.raise_for_status().json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
        (await http.post(f"{address}/reward", json=1.0, headers=headers)).raise_for_status()


async def measure(num_sessions: int, num_turns: int, wait_s: float, *, base_url: str) -> dict[str, Any]:
    """Have every session ask its turns, all sessions at once; return the numbers."""
    access = ServerAccess(base_urls=[base_url], key_variables=[""])
    completions = CompletionClient(
        settings=HostSettings(env_id="agent", name="bench", args={}, model_name="m", servers=access),
        environ=os.environ,
        sampling=SamplingArguments(temperature=1.0),
        base_url=base_url,
        seed=1,
    )

    async def run(server: AgentServer, session: AgentSession) -> None:
        async with server.serving(session) as address:
            await play(address, session, num_turns)

    sessions = [AgentSession(completions.complete, SessionLimits()) for _ in range(num_sessions)]
    server = AgentServer("127.0.0.1", model="m")
    async with server.listening():
        started = time.monotonic()
        await asyncio.gather(*(run(server, session) for session in sessions))
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
    sock = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = multiprocessing.get_context("fork").Process(target=serve_answers, args=(sock, args.wait_s), daemon=True)
    server.start()
    base_url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    numbers = asyncio.run(measure(args.sessions, args.turns, args.wait_s, base_url=base_url))
    server.terminate()
    server.join()
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
