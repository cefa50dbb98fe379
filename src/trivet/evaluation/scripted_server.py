"""Serves scripted policies to environments as an inference server would, on loopback.

The path of a base URL names the policy and the example, so one server answers for all of them: `/gold/17/v1/chat/completions`.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trivet.environments.apis.agents.formats import CHAT, ModelReply
from trivet.environments.apis.agents.server import AgentServer
from trivet.evaluation.scripted_policies import PolicyKind, Script, write_reply
from trivet.wire.groups import OVERLONG_REFUSALS

_MAX_TURNS = 32
"""Replies of the policy in a conversation. A longer one is refused as too long for the context, which ends a rollout in order."""


class ScriptedServer:
    """Answers chat completions.

    >>> async with serve_scripts() as server:
    ...     server.scripts = {17: Script(answer="4")}
    ...     base_url = server.base_url(PolicyKind.GOLD, 17)
    """

    def __init__(self) -> None:
        """Know no example yet."""
        self.root = ""
        """The server's address."""
        self.scripts: Mapping[int, Script] = {}
        """The script of each example, by its id."""

    def base_url(self, policy: PolicyKind, example_id: int) -> str:
        """Return the base URL under which a policy answers for an example."""
        return f"{self.root}/{policy.value}/{example_id}/v1"

    async def answer(self, request: Request) -> Response:
        """Answer a request with the policy and for the example that its path names."""
        asked = await request.json()
        messages = asked["messages"]
        if sum(message["role"] == "assistant" for message in messages) >= _MAX_TURNS:
            raise HTTPException(400, f"{OVERLONG_REFUSALS[0]}: {_MAX_TURNS} turns")
        policy, script = PolicyKind(request.path_params["policy"]), self.scripts[request.path_params["example_id"]]
        message = write_reply(policy, script, messages=messages, tools=asked.get("tools") or [], seed=asked.get("seed") or 0)
        reply = ModelReply(
            id="scripted",
            model=asked.get("model", ""),
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") else "stop",
            prompt_tokens=0,
            completion_tokens=len(str(message["content"]).split()),
            created=0,
        )
        answer = CHAT.write(reply)
        if asked.get("stream"):
            return Response("".join(CHAT.events(answer)), media_type="text/event-stream")
        return JSONResponse(answer)


@asynccontextmanager
async def serve_scripts() -> AsyncIterator[ScriptedServer]:
    """Serve on a free port of loopback for a block."""
    server = ScriptedServer()
    route = Route("/{policy}/{example_id:int}/v1/chat/completions", server.answer, methods=["POST"])
    agents = AgentServer("127.0.0.1", model="scripted")
    async with agents.listening([route]):
        server.root = agents.root
        yield server
