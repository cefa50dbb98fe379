"""Entry of the command `rl`.

The module that runs it is imported only after the configuration was read, so that help and mistakes in the configuration are shown
sooner.
"""

from functools import partial

from trivet.config.command import run_command
from trivet.config.schema.rl import RLConfig
from trivet.schedulers.submit import submit


def main() -> int:
    """Run the command with the arguments of this process and return its exit code."""
    return run_command(RLConfig, start, check=check, dry_run=check_for_dry_run, submit=partial(submit, command="rl"))


def check(config: RLConfig) -> None:
    """Check that this machine can run `config`, as `launcher.run.check`."""
    from trivet.launcher import run

    run.check(config)


def check_for_dry_run(config: RLConfig) -> None:
    """Check the checkpoint that a run resumes from and its environments, as a run itself does while it starts."""
    from trivet.launcher import run

    run.check_resume(config)
    run.check_environments(config)
    run.print_forecast(config)


def start(config: RLConfig) -> int:
    """Run `config`, which is resolved and checked, to its end and return the exit code."""
    from trivet.launcher import run

    return run.start(config)


if __name__ == "__main__":
    raise SystemExit(main())
