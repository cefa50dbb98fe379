"""Hands a command to the scheduler whose table its configuration has."""

from trivet.config.load import LoadedConfig
from trivet.config.schema.deployment import SlurmCommand
from trivet.config.schema.evaluation import EvalConfig
from trivet.errors import ConfigError
from trivet.schedulers import slurm
from trivet.schedulers.preparation import Submittable, show_notices

_TABLES = ("slurm", "kubernetes", "skypilot")


def submit(loaded: LoadedConfig[Submittable], *, command: SlurmCommand, is_dry_run: bool) -> int | None:
    """Write what the scheduler needs, and submit it where that is for the command to do; return the exit code.

    Args:
        loaded: not yet settled for this machine: the job settles it for its own.
        is_dry_run: write only, and show the resolved configuration.

    Returns:
        None without such a table: the command runs here.

    Raises:
        ConfigError: there are two such tables, one does not fit the other keys, or its files cannot be written.
        SubmissionFailed: sbatch refused the script, or there is none.
    """
    tables = [name for name in _TABLES if getattr(loaded.config, name, None) is not None]
    if not tables:
        return None
    if len(tables) > 1:
        raise ConfigError(f"[{tables[0]}] and [{tables[1]}] name two schedulers for one command; remove one of them")
    show_notices(loaded.notices)
    config = loaded.config
    if tables == ["slurm"]:
        said = slurm.submit(config, command=command, is_dry_run=is_dry_run)
    else:
        from trivet.schedulers import kubernetes, skypilot  # here: other commands need no YAML

        assert not isinstance(config, EvalConfig)
        said = (kubernetes if tables == ["kubernetes"] else skypilot).write(config, command=command)
    if is_dry_run:
        print(loaded.to_shown_toml())
    print(f"# {said}" if is_dry_run else said)
    return 0
