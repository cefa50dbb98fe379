"""A command that the library starts in place of `rl`: `python -m support.stand_in_command @ FILE`.

It takes a step every 50 ms. The number of steps says how it ends: from `FAILING` on with an error, else well. As the launcher does,
it commits at SIGTERM, and ends without a commit at SIGINT.
"""

import os
import signal
import sys
import time
import tomllib
from pathlib import Path

from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.key_names import key_name, names_from_variable, use_names
from trivet.telemetry.metrics import MetricsWriter

REFUSED, FAILING, ENDLESS = 1001, 1002, 1003
STEP_S = 0.05
COMMITTED, COMMITTING = "COMMITTED_BY_STAND_IN", "COMMITTING"
SLOW_COMMIT = "SLOW_COMMIT"
"""The commit lasts while this file exists."""


def main() -> int:
    config = tomllib.loads(Path(sys.argv[2]).read_text())
    max_steps, layout = config["max_steps"], RunLayout(Path(config["output_dir"]))
    if max_steps == REFUSED:
        with use_names(names_from_variable(os.environ)):
            print(f"error: {key_name('orchestrator.batch_size')} is wrong; add {key_name('--clean')}", file=sys.stderr)
        return 2
    (layout.root / "started").touch()

    def commit(number: int, frame: object) -> None:
        (layout.root / COMMITTING).touch()
        while (layout.root / SLOW_COMMIT).exists():
            time.sleep(STEP_S)  # a signal that comes just before a longer sleep is handled only after it
        (layout.root / COMMITTED).touch()
        sys.exit(143)

    signal.signal(signal.SIGTERM, commit)
    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(130))
    step = max(committed_steps(layout), default=0) if (config.get("ckpt") or {}).get("resume_step") else 0
    roles = ("orchestrator", "trainer")
    writers = [MetricsWriter(layout.metrics / f"{role}.jsonl", resume_step=step) for role in roles]
    while step < max_steps:
        step += 1
        for writer in writers:
            writer.write(step, {"reward/mean": step / 10, "loss/mean": 1.0})
        time.sleep(STEP_S)
        if max_steps == FAILING and step == 3:
            print("last words of a role")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
