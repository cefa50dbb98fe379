"""A process that behaves like a role, without its work: listens on a port, has a child of its own, ends as told.

`python stand_in_role.py NAME BEHAVIOUR PORT`; a file NAME.go beside the log (the working directory) makes it act.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
_IGNORING = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"]


def main(name: str, behaviour: str, port: int) -> int:
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    command = (
        _IGNORING
        if behaviour == "loose-child"
        else [sys.executable, "-m", "trivet.lifetime", "--parent", str(os.getpid()), *_SLEEPER]
    )
    subprocess.Popen(command, start_new_session=True)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        print(f"12:00:00 SUCCESS Step 1 | {name}", flush=True)
        Path(f"{name}.up").touch()
        while not Path(f"{name}.go").exists():
            time.sleep(0.02)
    for index in range(30):
        print(f"{name} line {index}", flush=True)
    if behaviour == "finish":
        Path(f"{name}.done").touch()
        return 0
    return int(behaviour) if behaviour.isdigit() else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
