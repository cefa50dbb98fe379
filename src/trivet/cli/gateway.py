"""`trivet gateway`: sessions for agents that run elsewhere. Each has a base URL and a key, and what it asked is written to a file.

    POST /sessions             with the key of the gateway: makes a session, and returns its base_url, api_key and reward_url
    POST {reward_url}          with the key of the session: ends it with its reward

Sessions that get no reward in time are written with the reason.
"""

import argparse
import asyncio
import logging
import os
import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trivet.client.inference_client import ask_model_name
from trivet.config.schema.inference import ClientConfig
from trivet.environments.apis.agents.completion_client import CompletionClient
from trivet.environments.apis.agents.server import AgentServer, has_key
from trivet.environments.apis.agents.session import AgentSession, SessionLimits
from trivet.environments.apis.turns import to_samples
from trivet.errors import ConfigError
from trivet.process.event_loop import run_until_signalled
from trivet.storage.durable import write_atomically
from trivet.wire.groups import SamplingArguments
from trivet.wire.workers import HostSettings

logger = logging.getLogger(__name__)

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
        "--max-session-tokens", type=int, default=1_000_000, metavar="N", help="tokens that one session samples (1000000)"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="seconds of one session (3600)")


def run_gateway(arguments: argparse.Namespace) -> int:
    """Serve sessions until a signal; return the exit code."""
    return asyncio.run(run_until_signalled(_serve(arguments)))


async def _serve(arguments: argparse.Namespace) -> int:
    client = ClientConfig(base_url=[arguments.base_url])
    model = await ask_model_name(arguments.base_url, environ=os.environ, timeout_s=_CONNECT_TIMEOUT_S)
    try:
        agents = AgentServer(arguments.host, arguments.port, model=model)
    except OSError as exc:
        raise ConfigError(
            f"--host {arguments.host} --port {arguments.port} cannot be used: {exc.strerror}; choose another"
        ) from exc
    key = secrets.token_urlsafe(24)
    write_atomically(arguments.key_file, f"{key}\n".encode(), is_private=True)
    fields = {} if arguments.max_tokens is None else {"max_tokens": arguments.max_tokens}
    completions = CompletionClient(
        settings=HostSettings(env_id="agent", name="gateway", args={}, model_name=model, servers=client.access),
        environ=os.environ,
        sampling=SamplingArguments(temperature=arguments.temperature, fields=fields),
        base_url=arguments.base_url,
        seed=None,
    )
    with arguments.output.open("ab", buffering=0) as output:
        async with asyncio.TaskGroup() as following:
            gateway = _Gateway(
                completions=completions,
                limits=SessionLimits(
                    max_turns=arguments.max_turns, max_tokens=arguments.max_session_tokens, timeout_s=arguments.timeout
                ),
                output=output,
                key=key,
                agents=agents,
                following=following,
            )
            async with agents.listening([Route("/sessions", gateway.make_session, methods=["POST"])]):
                print(f"gateway at {agents.root}/sessions, its key in {arguments.key_file}; sessions go to {arguments.output}")
                sys.stdout.flush()
                await asyncio.Event().wait()
    return 0


@dataclass(slots=True, kw_only=True)
class _Gateway:
    """The sessions of a gateway."""

    completions: CompletionClient
    """What the sessions ask; each has a seed of its own."""
    limits: SessionLimits
    output: BinaryIO
    """Opened once: strangers' connections may take all other descriptors."""
    key: str
    """The key with which sessions are made."""
    agents: AgentServer
    following: asyncio.TaskGroup
    """One task for each open session. The end of the gateway cancels it, and it writes its session."""
    num_sessions: int = 0

    async def make_session(self, request: Request) -> Response:
        """Make a session; return its addresses and its key."""
        if not has_key(request, self.key):
            raise HTTPException(401, "the key of the gateway is needed")
        self.num_sessions += 1
        number = self.num_sessions
        session = AgentSession(replace(self.completions, seed=number).complete, self.limits)
        self.following.create_task(self._follow(session, number), name=f"session-{number}")
        base_url = self.agents.address(session)
        told = {"base_url": f"{base_url}/v1", "anthropic_base_url": base_url, "reward_url": f"{base_url}/reward"}
        return JSONResponse({"id": number, "api_key": session.key, **told})

    async def _follow(self, session: AgentSession, number: int) -> None:
        """Serve a session until its reward or the end of its time, and write what it asked."""
        failure = "the gateway was ended before the session had a reward"
        try:
            async with self.agents.serving(session), asyncio.timeout(self.limits.timeout_s):
                await session.rewarded.wait()
            failure = ""
        except TimeoutError:
            failure = f"no reward within {self.limits.timeout_s:g} s"
        finally:
            self._write(session, number, failure=failure)

    def _write(self, session: AgentSession, number: int, *, failure: str) -> None:
        turns = session.delivered()
        samples, _ = to_samples(
            [recorded.turn for recorded in turns], temperature=self.completions.sampling.temperature, strategy="interleaved"
        )
        record = {
            "id": number,
            "reward": session.reward,
            "scores": session.scores,
            "failure": failure,
            "is_cut": session.is_cut,
            "turns": [{"messages": recorded.messages, "message": recorded.reply.message} for recorded in turns],
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
        try:
            self.output.write(msgspec.json.encode(record) + b"\n")
        except (OSError, ValueError, OverflowError) as exc:  # one session must not end the others
            logger.error("session %s is lost: it could not be written: %s", number, exc)
