"""Sections of environments: how they run, how tokens are sampled in them, and how a run is evaluated on them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, Field

from trivet.algorithms.schedules import cosine_value, linear_value
from trivet.config.layout import SECRET_FILE
from trivet.config.schema.base import MAX_PROCESSES, MAX_ROLLOUTS, MAX_TOKENS, MAX_WAIT_S, Host, Section, refuse_unless
from trivet.process.imports import file_of


class TempSchedulerConfig(Section):
    """Temperature as a function of the step that was being filled when a group started."""

    type: Literal["linear", "cosine"] = "linear"
    """Straight from start to end, or half a cosine."""
    start_temperature: float = Field(default=1.0, gt=0)
    """Temperature at step 1."""
    end_temperature: float = Field(default=1.0, gt=0)
    """Temperature at total_steps and after it."""
    total_steps: int | None = Field(default=None, ge=1)
    """Steps from start to end. Unset: max_steps of the first start; a resume with another max_steps keeps it."""

    def temperature_at(self, step: int, *, max_steps: int | None) -> float:
        """Return the temperature at `step`. The run's `max_steps` is needed, and checked before, if `total_steps` is not set."""
        schedule = {"linear": linear_value, "cosine": cosine_value}[self.type]
        num_steps = self.total_steps or max_steps or 1
        return schedule(step, start=self.start_temperature, end=self.end_temperature, num_steps=num_steps)


class RequestSamplingConfig(Section):
    """Sampling apart from the temperature."""

    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Tokens per model turn; unset: up to the context's end."""
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """No stop token before this many; above 0 biases the importance ratio."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; below 1 biases the importance ratio, which the trainer computes over the whole vocabulary."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample among the k likeliest; -1 and 0 are off. Biases the importance ratio."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens below this share of the likeliest; biases the importance ratio."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """1 is off; biases the importance ratio."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """0 is off; biases the importance ratio."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """0 is off; biases the importance ratio."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of each request, combined with its group and index; unset: not reproducible."""
    extra_body: dict[str, Any] = {}
    """Further request fields. A knob that has a key above is refused here."""


class SamplingConfig(RequestSamplingConfig):
    """Sampling in training."""

    temperature: float | None = Field(default=None, gt=0)
    """The trainer divides logits by it too. Unset: 1.0, or what temp_scheduler says."""
    temp_scheduler: TempSchedulerConfig | None = None
    """A temperature that changes with the step, instead of `temperature`."""

    def _problems(self) -> Iterator[str]:
        if self.temperature is not None and self.temp_scheduler is not None:
            yield (
                f"temperature ({self.temperature}) and temp_scheduler (start_temperature "
                f"{self.temp_scheduler.start_temperature}) exclude each other; remove one"
            )

    def temperature_at(self, step: int, *, max_steps: int | None) -> float:
        """Return the temperature of groups that start while batch `step` is being filled."""
        if self.temp_scheduler is not None:
            return self.temp_scheduler.temperature_at(step, max_steps=max_steps)
        return 1.0 if self.temperature is None else self.temperature


class EvalSamplingConfig(RequestSamplingConfig):
    """Sampling in evaluations."""

    temperature: float = Field(default=1.0, ge=0)
    """0 always takes the likeliest token."""


RunSamplingT = TypeVar("RunSamplingT", SamplingConfig, EvalSamplingConfig)


class EnvSamplingConfig(Section):
    """Changes to sampling in one environment. A key that is not set has the value of the run's `sampling`."""

    temperature: float | None = Field(default=None, gt=0)
    """Replaces the run's temperature or its schedule."""
    temp_scheduler: TempSchedulerConfig | None = None
    """Replaces the run's temperature or its schedule."""
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Tokens per model turn."""
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    """No stop token before this many."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int | None = Field(default=None, ge=-1)
    """Sample among the k likeliest; -1 and 0 are off."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Drop tokens below this share of the likeliest."""
    repetition_penalty: float | None = Field(default=None, gt=0)
    """1 is off."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """0 is off."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """0 is off."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of each request, combined with its group and index."""
    extra_body: dict[str, Any] = {}
    """Further request fields, merged over the run's field by field."""

    def _problems(self) -> Iterator[str]:
        if self.temperature is not None and self.temp_scheduler is not None:
            yield f"temperature ({self.temperature}) and temp_scheduler exclude each other; remove one"

    def over(self, run: RunSamplingT) -> RunSamplingT:
        """Return `run` with this environment's changes. Sampling of evaluations has no schedule."""
        changes = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        changes["extra_body"] = {**run.extra_body, **self.extra_body}
        if isinstance(run, SamplingConfig) and self.temperature is not None:
            changes["temp_scheduler"] = None
        elif isinstance(run, SamplingConfig) and self.temp_scheduler is not None:
            changes["temperature"] = None
        return run.model_copy(update=changes)


_ID = re.compile(r"(?P<package>(?:[\w.-]+/)?[\w.-]+)(?:(?:@|==)(?P<version>[^@=]+))?")
_ANY_VERSION = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentId:
    """The parts of an id."""

    package: str
    """The name of the package, with its owner where the id has one."""
    version: Version | None = None
    """The version that must be installed; None for any, which `@latest` means too."""

    @property
    def name(self) -> str:
        """The name of the package alone."""
        return self.package.rpartition("/")[2]


def parse_environment_id(text: str) -> EnvironmentId:
    """Return the parts of an id; raise ValueError if it is no name of a package, or its version is none."""
    found = _ID.fullmatch(text)
    if found is None:
        raise ValueError(
            "is no name of an environment; write my-env, owner/my-env, and with a version my-env@0.1.2 or my-env==0.1.2"
        )
    version = found["version"]
    try:
        return EnvironmentId(package=found["package"], version=None if version in (None, _ANY_VERSION) else Version(version))
    except InvalidVersion:
        raise ValueError(f"asks for version {version!r}, which is none; write it like {found['package']}@0.1.2") from None


_MAX_NAME_CHARS = 128
"""Longest name. It becomes the name of a directory, which file systems limit to 255 bytes."""


def _require_name(name: str) -> str:
    if not name.isprintable() or len(name) > _MAX_NAME_CHARS or "\\" in name or {"", ".", ".."} & set(name.split("/")):
        raise ValueError(
            f"names a directory of results: it must be printable, have at most {_MAX_NAME_CHARS} characters, and be no path "
            "that starts with / or has .. in it"
        )
    return name


def _require_id(id_or_function: str) -> str:
    if not (file_of(id_or_function) is not None and id_or_function.isprintable()):
        parse_environment_id(_require_name(id_or_function))
    return id_or_function


EnvName = Annotated[str, AfterValidator(_require_name)]
EnvId = Annotated[str, AfterValidator(_require_id)]
VariableName = Annotated[
    str,
    refuse_unless(
        lambda name: name != SECRET_FILE and name.isidentifier(),
        f"names a variable of the environment, and never {SECRET_FILE}, which holds the secret of the run",
    ),
]


class EnvWorkersConfig(Section):
    """Keys of the processes that run environments. The orchestrator and the command `eval` have them."""

    workers_per_env: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Processes that run each environment. One runs many rollouts at a time; more help where its own Python is slow."""
    max_env_worker_restarts: int = Field(default=5, ge=-1)
    """A worker that ended this often in a row, without finishing a group in between, ends the run or the evaluation; -1: never."""
    max_worker_memory: float | None = Field(default=None, gt=0)
    """Most memory of a worker with all that it started, GiB; one with more is restarted. Unset: half of the machine's."""
    strict_data: bool = False
    """Refuse an environment whose data differ from the checkpoint's, or between workers, as without a seed. False: only warn."""
    env_start_timeout_s: float = Field(default=1800.0, gt=0, le=MAX_WAIT_S)
    """Longest time for load_environment, downloads of data included, seconds."""
    env_worker_timeout_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """A worker whose event loop synchronous code blocks for longer is ended and started again, seconds."""
    rollout_timeout_s: float | None = Field(default=3600.0, gt=0, le=MAX_WAIT_S)
    """Longest time for the rollouts of one example and their scores, seconds; a group that needs longer fails. None: any."""


class EnvNodesConfig(Section):
    """The nodes that run environment workers, which may join and leave during the run. The launcher fills it in."""

    own: int = Field(ge=0)
    """The number of the node of this process."""
    num_required: int = Field(default=1, ge=1)
    """Nodes with environment workers for which a start waits a while. It begins with one."""
    max_nodes: int = Field(ge=1)
    """The numbers of nodes are below it: messages of others are refused."""
    host: Host
    """Address at which the orchestrator listens for the environment workers."""
    port: int = Field(ge=1, le=65535)
    """The port there, which the launcher holds."""
    drain_timeout_s: float = Field(default=60.0, ge=0, le=MAX_WAIT_S)
    """Longest time in which a node that leaves finishes its groups, seconds. What is left then is run elsewhere."""

    def _problems(self) -> Iterator[str]:
        if self.own >= self.max_nodes:
            yield f"own ({self.own}) must be below max_nodes ({self.max_nodes})"


class EnvConfig(Section):
    """An environment: its package, its arguments, and how the policy is sampled in it."""

    id: EnvId = "reverse-text"
    """Package of the environment, with a version as `my-env@0.1.2` or `my-env==0.1.2`; or `path/to/file.py:function`."""
    name: EnvName | None = None
    """Name in logs and metrics; defaults to the id without its version, and for a function to the name of its file. Unique."""
    args: dict[str, Any] = {}
    """Passed to load_environment."""
    on_reward_error: Literal["drop", "zero"] = "drop"
    """A reward function that raises, or returns no number: `drop` fails the group, `zero` takes 0 for it, as verifiers does."""
    venv: str = "auto"
    """Virtual environment of its workers: a name of `trivet env install`, a path, `trivet`, or `auto`: where that is installed."""
    env_vars: list[VariableName] = []
    """Variables that workers get although their names look secret (`KEY`, `TOKEN`, …); those of api_key_var they get anyway."""
    sampling: EnvSamplingConfig = EnvSamplingConfig()

    @property
    def program(self) -> tuple[str, dict[str, Any], str, list[str], str]:
        """All that a worker is started with. Workers of one environment can run any other with an equal program."""
        return self.package, self.args, self.on_reward_error, sorted(set(self.env_vars)), self.venv

    @property
    def label(self) -> str:
        """The environment's name in logs, metrics and file names."""
        return self.name or (Path(self.id).stem if file_of(self.id) is not None else self.package)

    @property
    def package(self) -> str:
        """The id without its version, by which a worker loads the environment."""
        return self.id if file_of(self.id) is not None else parse_environment_id(self.id).package

    @property
    def version(self) -> Version | None:
        """The version that must be installed; None for any."""
        return None if file_of(self.id) is not None else parse_environment_id(self.id).version


class EvalEnvConfig(EnvConfig):
    """One environment to evaluate on. Its evaluation data set is used."""

    interval: int | None = Field(default=None, ge=1)
    """Instead of eval.interval."""
    num_examples: int | None = Field(default=None, ge=-1)
    """Instead of eval.num_examples."""
    rollouts_per_example: int | None = Field(default=None, ge=1, le=MAX_ROLLOUTS)
    """Instead of eval.rollouts_per_example."""
    skip_first: int = Field(default=0, ge=0)
    """Leave out this many examples at the start of the data set."""


class OnlineEvalConfig(Section):
    """The newest policy is measured whenever a multiple of `interval` was reached or passed, and after the last step."""

    interval: int = Field(default=100, ge=1)
    """Policy versions between evaluations."""
    env: list[EvalEnvConfig] = Field(min_length=1)
    """Environments to evaluate on; may name the same environments as training."""
    num_examples: int = Field(default=-1, ge=-1)
    """Examples per environment, from the first; -1 is all."""
    rollouts_per_example: int = Field(default=1, ge=1, le=MAX_ROLLOUTS)
    """Attempts at each example."""
    max_concurrent: int = Field(default=64, ge=1, le=MAX_ROLLOUTS)
    """Evaluation rollouts in flight, beside those that are trained on."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """How evaluation rollouts are sampled; training's `sampling` does not apply."""
    eval_base_model: bool = True
    """Evaluate the start model before the first step."""
    skip_eval_on_resume: bool = True
    """A resumed run does not repeat the evaluation of the step that it resumes from; false: it does."""


class ValConfig(Section):
    """Validation on a few held-out examples of the environments that are trained on, sampled as in training: `val_reward/mean`."""

    num_examples: int = Field(default=16, ge=1)
    """Examples per environment."""
    rollouts_per_example: int = Field(default=1, ge=1, le=MAX_ROLLOUTS)
    """Attempts at each example."""
    interval: int = Field(default=10, ge=1)
    """Policy versions between validations."""
