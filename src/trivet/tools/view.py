"""`trivet view OUTPUT_DIR…`: a run, or several side by side, as a web page on this machine. It reads, and writes nothing."""

import argparse
import signal
import threading
import webbrowser
from pathlib import Path

from trivet.view.api import Api
from trivet.view.run import ViewedRun, name_runs, open_run

_ENDS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument(
        "output_dirs", type=Path, nargs="+", metavar="OUTPUT_DIR", help="a run's output_dir; several are compared"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one is found)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until SIGINT or SIGTERM; returns the exit code.

    Raises:
        ConfigError: a directory holds no run, or the port is taken.
    """
    layouts = [open_run(directory) for directory in arguments.output_dirs]
    runs = [ViewedRun(layout, name=name) for layout, name in zip(layouts, name_runs(arguments.output_dirs), strict=True)]
    from trivet.view.server import ViewServer  # here: the help of `trivet` needs no server

    server = ViewServer(Api(runs), host=arguments.host, port=arguments.port)
    if arguments.open:
        webbrowser.open(server.url)
    # Before any thread starts: a signal is waited for, and no thread may take it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    for viewed in runs:
        threading.Thread(target=viewed.warm_up, name=f"warm-up-{viewed.name}", daemon=True).start()
    with server.serving():
        print(f"{', '.join(viewed.name for viewed in runs)} at {server.url} (Ctrl-C ends)", flush=True)
        signal.sigwait(_ENDS)
    return 0
