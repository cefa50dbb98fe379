"""A launcher whose roles are stand-ins: `python stand_in_run.py BEHAVIOUR BEHAVIOUR BEHAVIOUR PORT PORT PORT`.

In the order inference, orchestrator, trainer. The working directory is the output directory.
"""

import os
import sys
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.config.shared import RunIdentity
from trivet.errors import TrivetError
from trivet.launcher.logs import RunLog
from trivet.launcher.plan import ProcessSpec
from trivet.launcher.run_directory import RunDirectory
from trivet.launcher.supervisor import supervise

_ROLE = Path(__file__).with_name("stand_in_role.py")
_NAMES = ("inference", "orchestrator", "trainer")


def main(behaviours: list[str], ports: list[str]) -> int:
    layout = RunLayout(Path.cwd())
    specs = [
        ProcessSpec(
            name=name,
            argv=(sys.executable, str(_ROLE), name, behaviour, port),
            log=layout.log_file(f"{name}.stdout"),
            env={},
            env_defaults={},
            does_finish=name != "inference",
        )
        for name, behaviour, port in zip(_NAMES, behaviours, ports, strict=True)
    ]
    with RunDirectory(layout) as directory:
        directory.begin(RunIdentity(), resumed_from=None)
        layout.logs.mkdir()
        with layout.log_file("rl.log").open("a") as file:
            return supervise(
                specs,
                python=sys.executable,
                environ=os.environ,
                log=RunLog(sys.stdout, file),
                is_complete=lambda name: Path(f"{name}.done").exists(),
                base_urls=(),
                shutdown_timeout_s=2.0,
                patience_s=30.0,
            )


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:4], sys.argv[4:7]))
    except TrivetError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from error
