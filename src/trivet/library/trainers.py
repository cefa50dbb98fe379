"""Provides `RLTrainer` and `SFTTrainer`: the commands `rl` and `sft` for Python programs, which iterate over their steps.

Processes, output directory and arithmetic are those of the commands. Steps are read from the files that the run writes, so a slow
loop body does not delay the run.
"""

import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from trivet.checkpoints.commit import committed_steps
from trivet.config.check_files import require_files
from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.errors import ConfigError
from trivet.key_names import names_to_variable, use_names
from trivet.launcher.logs import describe_activity, make_progress
from trivet.library.arguments import Environment, RLArguments, SFTArguments, plan_run, plan_sft
from trivet.library.callbacks import Callbacks
from trivet.library.functions import FunctionFiles
from trivet.library.process import PYTHON_NAMES, RunProcess
from trivet.library.rewards import RewardTask
from trivet.library.run import Policy, Run, RunStep, StepReader
from trivet.storage.durable import replace_file, write_atomically
from trivet.view.status import read_status

_POLL_INTERVAL_S = 0.2
"""Time between two reads of the files of a run, seconds: a step takes longer."""


_NO_ENGINE = (
    "vLLM, which generates the rollouts, is not installed; run: pip install 'trivet[cpu]', or 'trivet[cuda]' with an NVIDIA GPU, "
    "and the wheel of trivet in place of the name. For servers of your own set inference=None"
)


class _Trainer:
    """A run that this program starts. One loop at a time can iterate over its steps."""

    def __init__(
        self,
        config: RLConfig | SftConfig,
        *,
        module: str,
        names: Mapping[str, str] | None = None,
        stop_timeout_s: float = 0.0,
        functions: FunctionFiles | None = None,
        callbacks: Sequence[Any],
        progress: bool,
    ) -> None:
        self._config = config
        self._process = RunProcess(module, config, stop_timeout_s=stop_timeout_s, variables=names_to_variable(names or {}))
        self._layout = RunLayout(config.output_dir)
        self._functions = functions
        self._callbacks = callbacks
        Callbacks(callbacks, self._layout, since=0.0)  # refuses what is none
        self._progress = progress

    def __iter__(self) -> Iterator[RunStep]:
        """Start the run and yield each step that it has finished. Leaving the loop commits and ends the run.

        A resumed run first yields the steps up to its commit that no earlier loop received. If a process fails, a TrivetError with
        its last lines is raised.
        """
        if self._process.is_running:
            raise ConfigError("the run goes on already: one loop takes its steps; end that first, or call stop()")
        started, missed = time.time(), self._missed_steps()
        callbacks = Callbacks(self._callbacks, self._layout, since=started)
        if self._functions is not None:
            self._functions.write()
        with (
            self._process,
            _stopped_after_cell_errors(self._process),
            shown_progress(self._config.max_steps, is_wanted=self._progress) as show,
        ):
            for step in itertools.chain(missed, self._new_steps(show, callbacks, started=started)):
                replace_file(self._layout.yielded_step, str(step.number).encode())
                if callbacks.step(step):
                    self.stop()
                yield step
        callbacks.end(self.run)

    def train(self) -> Run:
        """Run to the end and return what the run wrote."""
        for _ in self:
            pass
        return self.run

    def stop(self) -> None:
        """Commit and end the run. A loop over its steps then ends too. May be called from a callback."""
        self._process.stop()

    def save_config(self, path: str | Path) -> Path:
        """Write the configuration as a file that the command takes after `@`. Only its owner may read it: it may hold secrets."""
        write_atomically(Path(path), to_toml(self._config).encode(), is_private=True)
        return Path(path)

    @property
    def run(self) -> Run:
        """The run's output until now. Raises a ConfigError if the run was never started."""
        return Run(self._layout.root)

    @property
    def policy(self) -> Policy:
        """The newest policy. Raises a WeightsError if none was published yet."""
        return self.run.policy

    def _missed_steps(self) -> list[RunStep]:
        """Return the steps that no loop received yet, up to the commit that the run resumes from. Empty for a new run."""
        ckpt, yielded = self._config.ckpt, self._layout.yielded_step
        if ckpt is None or ckpt.resume_step is None:
            yielded.unlink(missing_ok=True)
            return []
        committed = [step for step in committed_steps(self._layout) if ckpt.resume_step in (-1, step)]
        if not committed or not yielded.exists():
            return []
        last = int(yielded.read_text())
        return [step for step in StepReader(self._layout).read_new() if last < step.number <= committed[-1]]

    def rollouts_frame(self) -> Any:
        """Return the rollouts that were trained on until now, as `Run.rollouts_frame` does."""
        return self.run.rollouts_frame()

    def _new_steps(self, show: Callable[[int, str], None], callbacks: Callbacks, *, started: float) -> Iterator[RunStep]:
        """Yield the steps that the run has finished since the Unix time `started`, until it ends; raise its error if it failed."""
        reader, last = StepReader(self._layout, since=started), 0
        while True:
            exit_code = self._process.exit_code  # read before the files, so that nothing written before the end is missed
            for step in reader.read_new():
                last = step.number
                shown = {"reward": "reward/mean", "loss": "loss/mean"}
                values = (f"{label}={step.metrics[name]:.4g}" for label, name in shown.items() if name in step.metrics)
                show(last, " ".join(values))
                yield step
            if callbacks.results():
                self.stop()
            status = None
            if exit_code is not None or not last:
                with suppress(ConfigError):  # this start has written no status yet
                    status = read_status(self._layout)
                status = status if status is not None and status.time >= started else None
            if exit_code is not None:
                details = "" if status is None else "\n".join(part for part in (status.reason, status.last_error) if part)
                return self._process.require_success(details=details)
            if not last:
                show(0, "starting" if status is None else describe_activity(status))
            time.sleep(_POLL_INTERVAL_S)


class RLTrainer(_Trainer):
    """Reinforcement learning on an environment: the command `rl` for a Python program."""

    def __init__(  # noqa: PLR0913  # what a program may pass, each by its name
        self,
        model: str | Path,
        env: Environment | None = None,
        args: RLArguments | None = None,
        *,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tools: Sequence[Callable[..., Any]] = (),
        environment_factory: Callable[[], Any] | None = None,
        env_args: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] = (),
        progress: bool = True,
    ) -> None:
        """Check everything that can be checked before a process is started. A ConfigError lists every problem.

        Args:
            model: Hugging Face name or a directory.
            env: id of an installed environment, or a function that returns a verifiers environment; None: `reward_funcs`.
            args: the arguments of the run; None uses the documented defaults.
            reward_funcs: one function or several, as TRL's GRPOTrainer takes them: they get lists of prompts, completions and
                columns of the data, and return a number or None for each completion.
            train_dataset: examples with a column `prompt`, as a list of dictionaries, a datasets.Dataset or a path.
            eval_dataset: the same, for evaluations.
            tools: functions that the model may call.
            environment_factory: makes an object for each rollout, whose methods the model may call too, as in TRL.
            env_args: passed to load_environment, or to the function.
            callbacks: called in this process, after those of `args`.
            progress: show a bar in a terminal or a notebook.
        """
        args = args or RLArguments()
        task = None
        if reward_funcs is not None or train_dataset is not None or environment_factory is not None or tools:
            task = RewardTask(
                reward_funcs=reward_funcs,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                tools=tools,
                environment_factory=environment_factory,
            )
        planned = plan_run(model, env, args, env_args=env_args or {}, task=task)
        if planned.config.inference is not None and importlib.util.find_spec("vllm") is None:
            raise ConfigError(_NO_ENGINE)
        with use_names(PYTHON_NAMES):
            require_files(planned.config)
        super().__init__(
            planned.config,
            module="trivet.launcher.commands.rl",
            names=PYTHON_NAMES,
            functions=planned.functions,
            stop_timeout_s=planned.config.recovery.preemption_grace_s + planned.config.shutdown_timeout_s,
            callbacks=[*args.callbacks, *callbacks],
            progress=progress,
        )


class SFTTrainer(_Trainer):
    """Supervised fine-tuning on conversations: the command `sft` for a Python program."""

    def __init__(
        self,
        model: str | Path | None = None,
        data: str | Path | None = None,
        args: SFTArguments | None = None,
        *,
        callbacks: Sequence[Any] = (),
        progress: bool = True,
    ) -> None:
        """Check everything that can be checked before a process is started. A ConfigError lists every problem.

        Args:
            model: Hugging Face name or a directory; None: `args.model.name`.
            data: file, directory or data set with the conversations; None: `args.data.name`.
            args: the run's arguments; None: the defaults of `sft`.
            callbacks: called in this process.
            progress: show a bar in a terminal or a notebook.
        """
        config = plan_sft(model, data, args or SFTArguments())
        require_files(config)
        super().__init__(config, module="trivet.launcher.commands.sft", callbacks=callbacks, progress=progress)


@contextmanager
def shown_progress(max_steps: int | None, *, is_wanted: bool) -> Iterator[Callable[[int, str], None]]:
    """Show the progress of a run inside the block: a bar in a terminal, one line in a notebook, and nothing in a file.

    Yields a function that takes the last finished step, and what the run does now or measured.
    """
    if is_wanted and hasattr(_find_ipython(), "kernel"):  # only a notebook's shell has a kernel
        from IPython.display import display  # type: ignore[import-not-found]  # not a dependency: every notebook has it

        shown: Any = display({"text/plain": "starting"}, raw=True, display_id=True)
        total = "" if max_steps is None else f"/{max_steps}"

        @lru_cache(1)  # one update for each new state
        def update(step: int, activity: str) -> None:
            shown.update({"text/plain": f"step {step}{total}: {activity}"}, raw=True)

        yield update
    elif is_wanted and sys.stdout.isatty():
        with make_progress(sys.stdout, redirects_prints=True) as bar:  # it stays below what the program prints
            task = bar.add_task("", total=max_steps, activity="starting")
            yield lambda step, activity: bar.update(task, completed=step, activity=activity)
    else:
        yield lambda step, activity: None


def _find_ipython() -> Any:
    """Return the shell of IPython, or None outside of IPython, which is never imported here."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


@contextmanager
def _stopped_after_cell_errors(process: RunProcess) -> Iterator[None]:
    """End the run when a notebook's cell fails. The error keeps the cell's loop object alive, so the loop would not end it."""
    if (shell := _find_ipython()) is None:
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
