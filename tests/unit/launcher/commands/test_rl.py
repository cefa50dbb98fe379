import subprocess
import sys

HEAVY = ("numpy", "trivet.launcher.run", "trivet.launcher.supervision.supervisor", "trivet.environments.workers.pool")


def test_help_and_mistakes_are_shown_without_what_carries_a_run_out() -> None:
    program = f"import sys, trivet.launcher.commands.rl; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
