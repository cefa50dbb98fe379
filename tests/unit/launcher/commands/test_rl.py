import os
import subprocess
import sys

import pytest

HEAVY = ("numpy", "trivet.launcher.run", "trivet.launcher.supervision.supervisor", "trivet.environments.workers.pool")


def test_help_and_mistakes_are_shown_without_what_carries_a_run_out() -> None:
    program = f"import sys, trivet.launcher.commands.rl; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("pod_index", "exit_code"), [("0", 2), ("1", 75)])
def test_a_pod_that_does_not_lead_the_run_may_be_started_again_when_it_refuses_to_start(pod_index: str, exit_code: int) -> None:
    """Here the environment is not installed. Missing GPUs and a full directory for temporary files have the same effect."""
    pod = {"JOBSET_NODE_BASE": "0", "JOBSET_JOB_INDEX": "0", "JOB_COMPLETION_INDEX": pod_index}
    command = [sys.executable, "-m", "trivet.launcher.commands.rl", "--orchestrator.env.id", "owner/not-there"]
    done = subprocess.run(command, env={**os.environ, **pod}, capture_output=True, text=True, check=False)
    assert done.returncode == exit_code, done.stderr
