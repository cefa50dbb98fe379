"""Checks the reward functions, prompts and tools that a program passes to `RLTrainer`, and makes an environment of them.

Everything that can be checked is checked here, before a process is started. The environment itself is made in the workers, by
`environments.apis.v0.reward_functions`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.conversations.sources import open_source
from trivet.environments.apis.load import FIRST_V1_RELEASE, require_release
from trivet.environments.examples import digest_records
from trivet.errors import ConfigError, EnvironmentLoadError
from trivet.library.functions import FunctionFiles, name_of
from trivet.wire.groups import Split

if TYPE_CHECKING:
    from trivet.library.arguments import RLArguments

_LOADER = "trivet.environments.apis.v0.reward_functions:load_environment"
_GIVEN = {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra", "environments"}
"""Arguments of a reward function that are no columns of the data."""
_INSTALL = "pip install 'verifiers==0.3.1' && pip install 'mcp>=2'"
"""Two commands, because verifiers 0.3.1 requires mcp below 2 and vLLM requires mcp 2. verifiers uses mcp only for one kind of
environment, and works with both."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTask:
    """The arguments of `RLTrainer` that take the place of an environment. `RLTrainer` documents them."""

    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    train_dataset: Any = None
    eval_dataset: Any = None
    tools: Sequence[Callable[..., Any]] = ()
    environment_factory: Callable[[], Any] | None = None

    @property
    def has_tools(self) -> bool:
        """True when the model may call functions or methods of the program."""
        return bool(self.tools) or self.environment_factory is not None


def make_environment(task: RewardTask, args: "RLArguments", functions: FunctionFiles) -> dict[str, Any]:
    """Check a task and return the keys of its environment, whose files are among `functions`.

    `id` is the import path of its `load_environment`. `args` says what it is made of, for the page of a run and the model card.
    Raises a ConfigError with the name of the user's argument.
    """
    tools, factory = list(task.tools), task.environment_factory
    rewards = _named(task.reward_funcs, has_own_reward=hasattr(factory, "get_reward"))
    weights = [1.0] * len(rewards) if args.reward_weights is None else args.reward_weights
    if len(weights) != len(rewards):
        raise ConfigError(f"reward_weights has {len(weights)} weights for {len(rewards)} reward_funcs; give one for each")
    rows = {Split.TRAIN: read_rows(task.train_dataset, argument="train_dataset")}
    if task.eval_dataset is not None:
        rows[Split.EVAL] = read_rows(task.eval_dataset, argument="eval_dataset")
    is_text = isinstance(rows[Split.TRAIN][0]["prompt"], str)
    if is_text and task.has_tools:
        raise ConfigError("tools need conversations: make each prompt of train_dataset a list of messages, not a text")
    for split, own_rows in rows.items():
        for name, function in rewards.items():
            _require_columns(name, function, own_rows, argument=f"{split}_dataset", has_objects=factory is not None)
    for tool in tools:
        if not callable(tool) or isinstance(tool, type) or not inspect.getdoc(tool):
            raise ConfigError(
                f"tools: {name_of(tool, default='tools')} must be a function with a docstring, which the model reads; a class "
                "whose methods are tools is the environment_factory"
            )
    if isinstance(factory, type) and not hasattr(factory, "reset"):
        raise ConfigError(f"environment_factory: {factory.__name__} needs the method reset(**columns), as TRL asks for it")
    _require_verifiers()
    description = {
        "reward_funcs": dict(zip(rewards, weights, strict=True)),
        "tools": [name_of(tool, default="tools") for tool in tools],
        **({} if factory is None else {"environment_factory": name_of(factory, default="environment_factory")}),
        **{f"{split}_dataset": f"{len(own)} examples, SHA-256 {digest_records(own)[:16]}" for split, own in rows.items()},
    }
    arguments = {
        "rows": rows,
        "reward_funcs": {name: (function, weight) for (name, function), weight in zip(rewards.items(), weights, strict=True)},
        "tools": tools,
        "environment_factory": factory,
        "max_turns": -1 if args.max_tool_calling_iterations is None else args.max_tool_calling_iterations + 1,
        "max_steps": args.max_steps,
        "examples_per_step": args.batch_size / args.rollouts_per_example,
    }
    identity = [rewards, tools, factory]
    path = functions.path_of_call(_LOADER, arguments, argument="reward_funcs", identity=identity)
    return {"id": path, "args": {"made_of": description}}


def read_rows(data: Any, *, argument: str) -> Rows:
    """Return the examples of a list, a data set or a path, each with a prompt. A ConfigError names the user's `argument`."""
    if isinstance(data, str | Path):
        try:
            rows: Any = open_source(str(data), key=argument)
        except ConfigError as exc:
            raise ConfigError(str(exc).replace(f"{argument}.name", argument)) from exc
    elif isinstance(data, list | tuple) or (hasattr(data, "column_names") and hasattr(data, "__len__")):
        rows = data
    else:
        raise ConfigError(
            f"{argument} must be a list of dictionaries, a datasets.Dataset or a path, got {type(data).__name__}; of a stream "
            "take a part, as list(data.take(1000))"
        )
    if isinstance(rows, Mapping):
        raise ConfigError(f"{argument} has the splits {', '.join(rows)}; give one, as {argument}=data[{next(iter(rows))!r}]")
    if not len(rows):
        raise ConfigError(f"{argument} has no examples")
    kinds = {_kind_of(row, index, argument=argument) for index, row in enumerate(rows)}
    if len(kinds) > 1:
        raise ConfigError(f"{argument}: some prompts are texts and some are lists of messages; make all of one kind")
    return rows


def _kind_of(row: Any, index: int, *, argument: str) -> type:
    """Return str for a row with a prompt of text, list for one with messages."""
    where = f"{argument}[{index}]"
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} must be a dictionary, got {row!r}")
    if "prompt" not in row:
        raise ConfigError(
            f"{where} has no column prompt, only {', '.join(map(str, row)) or 'none'}; rename the one with the prompts"
        )
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return str
    is_conversation = isinstance(prompt, list | tuple) and all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in prompt
    )
    if not prompt or not is_conversation:
        raise ConfigError(f"{where}: prompt must be a text or a list of messages with role and content, got {prompt!r}")
    return list


def _named(functions: Any, *, has_own_reward: bool) -> dict[str, Callable[..., Any]]:
    """Return the reward functions by distinct names."""
    listed = [] if functions is None else list(functions) if isinstance(functions, list | tuple) else [functions]
    if not listed and not has_own_reward:
        raise ConfigError(
            "reward_funcs is empty: give at least one function, or an object with get_reward in environment_factory"
        )
    named: dict[str, Callable[..., Any]] = {}
    for function in listed:
        if not callable(function):
            raise ConfigError(
                f"reward_funcs: {function!r} is no function. To score with a model, load it inside a function and return its scores"
            )
        name = name_of(function, default="reward")
        named[name if name not in named else f"{name}_{len(named) + 1}"] = function
    return named


def _require_columns(name: str, function: Callable[..., Any], rows: Rows, *, argument: str, has_objects: bool) -> None:
    """Refuse a function that requires an argument which it would not get."""
    parameters = inspect.signature(function).parameters
    given = _GIVEN - (set() if has_objects else {"environments"})
    columns = set(getattr(rows, "column_names", None) or {column for row in rows for column in row}) - {"prompt"}
    for parameter in parameters.values():
        is_required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if is_required and parameter.kind is not parameter.VAR_POSITIONAL and parameter.name not in given | columns:
            raise ConfigError(
                f"reward_funcs: {name} asks for {parameter.name!r}, and {argument} has no such column; it has "
                f"{', '.join(sorted(columns)) or 'only prompt'}, and every function may ask for {', '.join(sorted(given))}"
            )


def _require_verifiers() -> None:
    """Refuse to go on without the release of verifiers that the environment is made with."""
    try:
        release = require_release("reward_funcs")
    except EnvironmentLoadError:
        release = None
    if release is None or release >= FIRST_V1_RELEASE:
        found = "is not installed" if release is None else f"{release[0]}.{release[1]} has no v0 API"
        raise ConfigError(f"reward_funcs are played by an environment of verifiers 0.3, and verifiers {found}; run: {_INSTALL}")
