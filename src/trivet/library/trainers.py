"""`RLTrainer` and `SFTTrainer`: the commands `rl` and `sft` for a program, which takes their steps one by one.

The processes, the output directory and the arithmetic are those of the commands. Steps are read from what the run writes, so that a
slow loop body holds nothing up.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.schema.base import Section
from trivet.errors import ConfigError
from trivet.key_names import to_variable
from trivet.launcher.terminal import describe_activity
from trivet.library.arguments import RLArguments, SFTArguments
from trivet.library.functions import FunctionFiles
from trivet.library.messages import PYTHON_NAMES, name_in_python, require_success
from trivet.library.process import RunProcess
from trivet.library.progress import ProgressBar, open_progress
from trivet.library.run import Policy, Run, RunStep, StepReader
from trivet.library.run_config import Environment, plan_run, plan_sft, require_files
from trivet.storage.durable import write_atomically
from trivet.view.status import read_status
from trivet.wire.status import RunStatus

_POLL_INTERVAL_S = 0.2
"""Time between two looks at the files of a run, seconds: a step takes longer."""


class _Trainer:
    """A run that this program starts. It can be started once at a time."""

    def __init__(
        self,
        config: Section,
        *,
        module: str,
        output_dir: Path,
        max_steps: int | None,
        names: Mapping[str, str] | None = None,
        stop_timeout_s: float = 0.0,
        callbacks: Sequence[Callable[[RunStep], object]],
        progress: bool,
    ) -> None:
        self._config = config
        self._process = RunProcess(module, config, stop_timeout_s=stop_timeout_s, variables=to_variable(names or {}))
        self._layout = RunLayout(output_dir)
        self._max_steps = max_steps
        self._callbacks = callbacks
        self._progress = progress

    def __iter__(self) -> Iterator[RunStep]:
        """Start the run and yield each step that it has finished. Leaving the loop commits and ends the run.

        Raises:
            TrivetError: the run failed; the text has the last lines of the process that did.
        """
        started = time.time()
        with self._running(), open_progress(self._max_steps, is_wanted=self._progress) as bar:
            for step in self._steps(StepReader(self._layout, since=started), bar, started=started):
                for callback in self._callbacks:
                    callback(step)
                yield step

    def train(self) -> Run:
        """Run to the end and return what the run wrote.

        Raises:
            TrivetError: as when iterating.
        """
        for _ in self:
            pass
        return self.run

    def stop(self) -> None:
        """Commit and end the run; a loop over the steps ends. May be called from a callback."""
        self._process.stop()

    def save_config(self, path: str | Path) -> Path:
        """Write the configuration as a file that the command takes after `@`. Only its owner may read it: it may hold secrets."""
        write_atomically(Path(path), to_toml(self._config).encode(), is_private=True)
        return Path(path)

    @property
    def run(self) -> Run:
        """Everything that the run has written until now.

        Raises:
            ConfigError: it was never started.
        """
        return Run(self._layout.root)

    @property
    def policy(self) -> Policy:
        """The newest policy.

        Raises:
            WeightsError: none was published yet.
        """
        return self.run.policy

    def _prepare(self) -> None:
        """Write what the processes of the run read besides their configuration."""

    @contextmanager
    def _running(self) -> Iterator[None]:
        if self._process.is_running:
            raise ConfigError("the run goes on already: one loop takes its steps; end that first, or call stop()")
        self._prepare()
        with self._process, _stopping_after_errors(self._process):
            yield

    def _steps(self, reader: StepReader, bar: ProgressBar, *, started: float) -> Iterator[RunStep]:
        last = 0
        while True:
            exit_code = self._process.exit_code  # before the files: what was written before its end is read then
            for step in reader.read_new():
                last = step.number
                bar.update(last, doing=_describe_metrics(step))
                yield step
            if exit_code is not None:
                return require_success(self._process, details=_last_error(self._layout, since=started))
            if not last:
                bar.update(0, doing=_describe_status(self._layout, since=started))
            time.sleep(_POLL_INTERVAL_S)


class RLTrainer(_Trainer):
    """Reinforcement learning on an environment: the command `rl` for a program."""

    def __init__(
        self,
        model: str | Path,
        env: Environment,
        args: RLArguments | None = None,
        *,
        env_args: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> None:
        """Check everything that can be checked before a process is started.

        Args:
            model: Hugging Face name or a directory.
            env: id of an installed environment, or a function that returns a verifiers environment.
            args: the run's arguments; None: the documented defaults.
            env_args: passed to load_environment, or to the function.
            progress: show a bar in a terminal or a notebook.

        Raises:
            ConfigError: lists every problem, by the names that were written.
            EnvironmentLoadError: the environment is not installed.
        """
        args = args or RLArguments()
        planned = plan_run(model, env, args, env_args=env_args or {})
        require_files(planned.config, name_of=name_in_python)
        self._functions: FunctionFiles = planned.functions
        super().__init__(
            planned.config,
            module="trivet.launcher.commands.rl",
            output_dir=planned.config.output_dir,
            max_steps=planned.config.max_steps,
            names=PYTHON_NAMES,
            stop_timeout_s=planned.config.recovery.preemption_grace_s + planned.config.shutdown_timeout_s,
            callbacks=args.callbacks,
            progress=progress,
        )

    def _prepare(self) -> None:
        self._functions.write()


class SFTTrainer(_Trainer):
    """Supervised fine-tuning on conversations: the command `sft` for a program."""

    def __init__(
        self,
        model: str | Path | None = None,
        data: str | Path | None = None,
        args: SFTArguments | None = None,
        *,
        callbacks: Sequence[Callable[[RunStep], object]] = (),
        progress: bool = True,
    ) -> None:
        """Check everything that can be checked before a process is started.

        Args:
            model: Hugging Face name or a directory; None: `args.model.name`.
            data: where the conversations are, as `args.data.name`; None: that one.
            args: the run's arguments; None: the defaults of `sft`.
            callbacks: called in this process with each step.
            progress: show a bar in a terminal or a notebook.

        Raises:
            ConfigError: lists every problem.
        """
        config = plan_sft(model, data, args or SFTArguments())
        require_files(config)
        super().__init__(
            config,
            module="trivet.launcher.commands.sft",
            output_dir=config.output_dir,
            max_steps=config.max_steps,
            callbacks=callbacks,
            progress=progress,
        )


def _describe_metrics(step: RunStep) -> str:
    shown = {"reward": "reward/mean", "loss": "loss/mean"}
    return " ".join(f"{label}={step.metrics[name]:.4g}" for label, name in shown.items() if name in step.metrics)


def _describe_status(layout: RunLayout, *, since: float) -> str:
    status = _read_status(layout, since=since)
    return "starting" if status is None else describe_activity(status)


def _last_error(layout: RunLayout, *, since: float) -> str:
    status = _read_status(layout, since=since)
    return "" if status is None else "\n".join(part for part in (status.reason, status.last_error) if part)


def _read_status(layout: RunLayout, *, since: float) -> RunStatus | None:
    """Return the status that the launcher of this start has written, if there is one."""
    try:
        status = read_status(layout)
    except ConfigError:
        return None
    return status if status.time >= since else None


@contextmanager
def _stopping_after_errors(process: RunProcess) -> Iterator[None]:
    """End the run when a cell of a notebook fails: the error keeps the cell's loop alive, so that nothing else would end it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        yield
        return

    def stop_after_error(result: Any) -> None:
        if result is not None and result.error_in_exec is not None:
            process.stop()

    shell.events.register("post_run_cell", stop_after_error)
    try:
        yield
    finally:
        shell.events.unregister("post_run_cell", stop_after_error)
