"""Runs the origin: the process next to the trainer from which inference servers fetch policies (`weights.transport = "http"`).

The launcher starts it with the trainer's configuration file. It serves `weights/` read-only to clients with the run's secret, and
keeps no state: after a restart, servers resume what they were fetching.
"""

import os

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trivet.config.command import run_command
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError
from trivet.gate import Gate
from trivet.process.sockets import listen
from trivet.secret import find_secret
from trivet.telemetry import process_report
from trivet.telemetry.logs import setup_logging
from trivet.weights.serve import PolicyFiles

_MAX_CONNECTIONS = 1000
"""Further connections are answered with status 503. Most requests are refusals of a busy origin, and end at once."""
_STOP_TIMEOUT_S = 2
"""Seconds that transfers have to end when the origin stops. Readers resume what is cut off."""


def main() -> int:
    """Run the command; return its exit code."""
    return run_command(TrainerConfig, serve)


def serve(config: TrainerConfig) -> int:
    """Serve policies until a signal comes; the signal then ends this process."""
    layout, origin = RunLayout(config.output_dir), config.weights.origin
    setup_logging("origin", level=config.log.level, as_json=config.log.json_logging)
    process_report.start_reports(layout, role="origin", attempt=config.run.attempt)

    async def health(_: Request) -> Response:
        return Response()

    files = PolicyFiles(layout.weights, max_transfers=origin.max_transfers)
    app = Gate(
        Starlette(routes=[files.route, Route("/health", health)]),
        token=find_secret(layout, environ=os.environ).token,
        host=origin.host,
        is_open=lambda path: path == "/health",
    )
    try:
        listener = listen(origin.host, origin.port)
    except OSError as exc:
        raise ConfigError(
            f"weights.origin cannot listen on {origin.host}:{origin.port}: {exc.strerror}; choose another port"
        ) from exc
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # a line for each request of a reader that waits would fill the log
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
        )
    )
    process_report.begin("serving policies")
    with listener:
        server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
