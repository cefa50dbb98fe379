"""The command `rl`. What carries a run out is imported when a configuration was read: help and mistakes in it are shown sooner."""

import os
from functools import partial

from trivet.config.command import run_command
from trivet.config.schema.rl import RLConfig
from trivet.schedulers.node_variables import pod_exit_code
from trivet.schedulers.submit import submit


def main() -> int:
    """Run the command with the arguments of this process; returns its exit code."""
    exit_code = run_command(RLConfig, start, check=check, dry_run=check_for_dry_run, submit=partial(submit, command="rl"))
    return pod_exit_code(exit_code, os.environ)


def check(config: RLConfig) -> None:
    """Refuse what this machine cannot run, as `launcher.run.check` does."""
    from trivet.launcher import run

    run.check(config)


def check_for_dry_run(config: RLConfig) -> None:
    """Check what a run checks while it starts: the checkpoint that it resumes from, and its environments."""
    from trivet.launcher import run

    run.check_resume(config)
    run.check_environments(config)


def start(config: RLConfig) -> int:
    """Run `config`, resolved and checked, to its end; returns the exit code."""
    from trivet.launcher import run

    return run.start(config)


if __name__ == "__main__":
    raise SystemExit(main())
