"""A process that behaves like a role, without its work: it listens, has a child, reports, and ends as told.

`python stand_in_role.py NAME BEHAVIOUR PORT ATTEMPT`; a file NAME.go beside the log (the working directory) makes it act once.
On SIGUSR1 the orchestrator has the trainer end after its step, as the real one does, and ends itself.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.process.lifetime import tied_command
from trivet.process.sockets import listen
from trivet.telemetry import process_report

_SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
_IGNORING = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"]
_LAST_BATCH = Path("last_batch_sent")


def main(name: str, behaviour: str, port: int, attempt: int) -> int:
    if behaviour == "early":
        print("12:00:00 cannot start", flush=True)
        return 1
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if name == "orchestrator":
        signal.signal(signal.SIGUSR1, lambda *_: _LAST_BATCH.touch())
    process_report.start_reports(RunLayout(Path.cwd()), role=name, attempt=attempt)
    command = _IGNORING if behaviour == "loose-child" else tied_command(_SLEEPER)
    subprocess.Popen(command, start_new_session=True)
    with listen("127.0.0.1", port):
        print(f"12:00:00 SUCCESS Step 1 | {name}", flush=True)
        process_report.set_numbers(step=1)
        Path(f"{name}.up").write_text(str(attempt))
        while not Path(f"{name}.go").exists():
            time.sleep(0.02)
            if _LAST_BATCH.exists() and name != "inference" and behaviour != "slow":
                return 0
    Path(f"{name}.go").unlink()
    for index in range(30):
        print(f"{name} line {index}", flush=True)
    if behaviour == "finish":
        Path(f"{name}.done").touch()
        return 0
    return int(behaviour) if behaviour.isdigit() else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
