"""`trivet gateway`: sessions for agents that run elsewhere. Each has a base URL and a key, and what it asked is written to a file.

    POST /sessions             with the key of the gateway: makes a session, and returns its base_url, api_key and reward_url
    POST {reward_url}          with the key of the session: ends it with its reward

Sessions that get no reward in time are written with the reason.
"""

import argparse
import asyncio
import hmac
import os
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trivet.client.inference_client import InferenceClient
from trivet.config.schema.inference import ClientConfig
from trivet.environments.apis.agents.asker import ServerAsker, open_asker
from trivet.environments.apis.agents.formats import ModelRequest
from trivet.environments.apis.agents.server import AgentServer, serve_agents
from trivet.environments.apis.agents.session import AgentSession, SessionLimits
from trivet.environments.apis.turns import later_seed, to_samples
from trivet.process.event_loop import run_until_signalled
from trivet.process.proxies import is_direct
from trivet.storage.durable import write_atomically
from trivet.wire.groups import SamplingArguments
from trivet.wire.workers import HostSettings

_CONNECT_TIMEOUT_S = 60.0


def configure_gateway(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", metavar="URL", help="the inference server")
    parser.add_argument("--output", type=Path, default=Path("sessions.jsonl"), metavar="FILE", help="where sessions are added")
    parser.add_argument("--key-file", type=Path, default=Path("gateway.key"), metavar="FILE", help="where its key is written")
    parser.add_argument("--host", default="127.0.0.1", help="the address at which it listens (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="the port (default: a free one)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of one answer")
    parser.add_argument("--max-turns", type=int, default=64, metavar="N", help="answers in one session (64)")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="seconds of a session without a reward (3600)"
    )


def run_gateway(arguments: argparse.Namespace) -> int:
    """Serve sessions until a signal; return the exit code."""
    return asyncio.run(run_until_signalled(_serve(arguments)))


async def _serve(arguments: argparse.Namespace) -> int:
    client = ClientConfig(base_url=[arguments.base_url])
    server = InferenceClient(
        arguments.base_url,
        timeout_s=_CONNECT_TIMEOUT_S,
        headers=client.request_headers(arguments.base_url, os.environ),
        is_direct=is_direct(arguments.base_url, os.environ),
    )
    try:
        await server.wait_ready(_CONNECT_TIMEOUT_S)
        model = await server.model_name()
    finally:
        await server.aclose()
    settings = HostSettings(env_id="agent", name="gateway", args={}, model_name=model, servers=client.access)
    key = secrets.token_urlsafe(24)
    write_atomically(arguments.key_file, f"{key}\n".encode(), is_private=True)
    gateway = _Gateway(arguments, key)
    async with (
        open_asker(settings, os.environ) as gateway.asker,
        serve_agents(arguments.host, model=model, port=arguments.port, routes=[gateway.route()]) as gateway.server,
    ):
        print(f"gateway at {gateway.server.root}/sessions, its key in {arguments.key_file}; sessions go to {arguments.output}")
        sys.stdout.flush()
        try:
            await asyncio.Event().wait()
        finally:
            following = list(gateway.following)
            for task in following:
                task.cancel()  # it writes its session
            await asyncio.gather(*following)
    return 0


@dataclass(slots=True)
class _Gateway:
    arguments: argparse.Namespace
    key: str
    asker: ServerAsker = None  # type: ignore[assignment]  # set before the first request
    server: AgentServer = None  # type: ignore[assignment]  # as above
    num_sessions: int = 0
    following: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    """One task for each open session."""

    def route(self) -> Route:
        """Return the route that makes sessions."""

        async def make(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.key.encode()):
                return JSONResponse({"error": {"message": "the key of the gateway is needed"}}, 401)
            session = self._make_session()
            address = self.server.open(session)
            task = asyncio.create_task(self._follow(session, self.num_sessions), name=f"session-{self.num_sessions}")
            self.following.add(task)
            task.add_done_callback(self.following.discard)
            told = {"base_url": f"{address}/v1", "anthropic_base_url": address, "reward_url": f"{address}/reward"}
            return JSONResponse({"id": self.num_sessions, "api_key": session.key, **told})

        return Route("/sessions", make, methods=["POST"])

    def _make_session(self) -> AgentSession:
        self.num_sessions += 1
        arguments, number = self.arguments, self.num_sessions
        fields = {} if arguments.max_tokens is None else {"max_tokens": arguments.max_tokens}
        sampling = SamplingArguments(temperature=arguments.temperature, fields=fields)

        async def complete(asked: ModelRequest, turn: int, known: Any) -> dict[str, Any]:
            seed = later_seed(number, "turn", turn)
            return await self.asker.complete(asked, sampling, base_url=arguments.base_url, seed=seed, known=known)

        return AgentSession(complete, SessionLimits(max_turns=arguments.max_turns))

    async def _follow(self, session: AgentSession, number: int) -> None:
        """Wait for the reward of a session, and write what it asked."""
        failure = ""
        try:
            async with asyncio.timeout(self.arguments.timeout):
                await session.rewarded.wait()
        except TimeoutError:
            failure = f"no reward within {self.arguments.timeout:g} s"
        except asyncio.CancelledError:
            failure = "the gateway was ended before the session had a reward"
        self.server.close(session)
        await session.aclose()
        turns = session.delivered()
        samples, _ = to_samples(
            [recorded.turn for recorded in turns], temperature=self.arguments.temperature, strategy="interleaved"
        )
        record = {
            "id": number,
            "reward": session.reward,
            "scores": session.scores,
            "failure": failure,
            "is_cut": session.is_cut,
            "turns": [{"messages": recorded.messages, "message": recorded.message} for recorded in turns],
            "samples": [
                {
                    "token_ids": sample.token_ids_T.tolist(),
                    "loss_mask": sample.loss_mask_T.tolist(),
                    "logprobs": sample.logprobs_T.tolist(),
                    "versions": sample.versions,
                }
                for sample in samples
            ],
        }
        with self.arguments.output.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
