"""Finds the directory of the results of `eval`, and checks that existing results are those to continue. Writes nothing."""

from collections.abc import Sequence
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EvalEnvConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.shared import DEFAULT_OUTPUT_DIR
from trivet.errors import ConfigError
from trivet.evaluation.offline import make_env_task, select_envs
from trivet.evaluation.results import require_continuable
from trivet.evaluation.targets import Target
from trivet.wire.groups import EnvironmentInfo

UNKNOWN_UNTIL_LOADED = ("split", "num_examples")
"""Fields of a task that depend on the environment's data."""
_ANY_DATA = EnvironmentInfo(num_examples=2**62)


def results_layout(config: EvalConfig) -> RunLayout:
    """Return the layout of the output directory of `eval`.

    Raises:
        ConfigError: `resume_path` holds no evaluation.
    """
    if config.resume_path is not None:
        return RunLayout(_root_of(config.resume_path))
    if config.output_dir is not None:
        return RunLayout(config.output_dir)
    return RunLayout(config.weights_dir.absolute().parent if config.weights_dir is not None else DEFAULT_OUTPUT_DIR)


def require_resumable(config: EvalConfig, targets: Sequence[tuple[Target, str]], *, envs: Sequence[EvalEnvConfig]) -> None:
    """Check that `resume_path` has results of the targets.

    Args:
        targets: each with the digest of its weights.

    Raises:
        ConfigError: it has results of something else, or nothing of what is asked for.
    """
    layout = results_layout(config)
    asked = [
        (layout.evals_step(target.step, env.label), make_env_task(config, env, _ANY_DATA, step=target.step, digest=digest))
        for target, digest in targets
        for env in select_envs(config, target, envs)
    ]
    found = [directory for directory, task in asked if require_continuable(directory, task, unknown=UNKNOWN_UNTIL_LOADED)]
    named = _evaluation_of(config.resume_path) if config.resume_path is not None else None
    if not found or (named is not None and named.resolve() not in [directory.resolve() for directory in found]):
        there = sorted(str(path.parent.relative_to(layout.root)) for path in layout.evals.glob("step_*/**/task.json"))
        raise ConfigError(
            f"resume_path ({config.resume_path}) is none of the evaluations asked for; in {layout.root} there are: "
            f"{', '.join(there) or 'none'}"
        )


def _root_of(path: Path) -> Path:
    """Return the output directory of the evaluation that `path` belongs to."""
    directory = path.parent if path.is_file() else path
    if _evaluation_of(path) is not None:
        evals = next((parent for parent in directory.absolute().parents if parent.name == "evals"), None)
        if evals is not None:
            return evals.parent
    if directory.name == "evals" and directory.is_dir():
        return directory.absolute().parent
    if (directory / "evals").is_dir():
        return directory
    raise ConfigError(
        f"resume_path ({path}) holds no evaluation: give the output_dir of one, which has evals/ in it, or its evals/step_N/<env>"
    )


def _evaluation_of(path: Path) -> Path | None:
    """Return the evals/step_N/<env> that `path` names; None when it names more than one."""
    directory = path.parent if path.is_file() else path
    return directory if (directory / "task.json").is_file() else None
