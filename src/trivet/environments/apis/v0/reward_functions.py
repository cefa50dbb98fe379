"""Makes an environment of plain reward functions, tools and prompts, by the conventions of TRL's GRPOTrainer.

`library.functions` writes a file that calls `load_environment` in a worker. A reward function scores all rollouts of a group in one
call: each of its arguments is a list with one entry for each rollout, and so is its result, in which None means "not applicable".

Source: TRL 1.16, `GRPOTrainer._calculate_rewards` and its data formats.
"""

import asyncio
import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import verifiers as vf
from datasets import Dataset

from trivet.environments.apis.rewards import ScoreForm, guard
from trivet.environments.examples import digest_records
from trivet.wire.groups import Split

logger = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]
"""Examples by column. Each has a `prompt`: a text, or messages in the OpenAI chat form."""

_OBJECT = "environment_object"
"""The key of a rollout's state with the object whose methods are its tools."""
_OWNER = "self"
"""The argument by which a tool that is a method gets its object. No model can set it: it is written last."""
_NOT_TOOLS = ("reset", "get_reward")
"""Public methods of such an object that the model cannot call."""
_UNSCORED = "unscored"
"""The metric that is 1 for a rollout to which no reward function applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The argument `trainer_state` of a reward function."""

    global_step: int
    """The optimizer steps of the newest policy that sampled a token of the group."""
    max_steps: int
    """Steps of the run."""
    epoch: float
    """How often these steps went through the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The arguments of reward functions for one group, and the further numbers that the functions report."""

    arguments: Mapping[str, Any]
    num_rollouts: int
    missing: Sequence[str]
    """Arguments that functions may ask for and that these rollouts do not have."""
    reported: dict[str, list[float]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Report a number for the whole group."""
        self.reported[name] = [float(value)] * self.num_rollouts

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Report a value for each rollout. Only numbers are kept."""
        if all(isinstance(value, int | float) for value in values):
            self.reported[column] = [float(value) for value in values]


class FunctionRubric(vf.Rubric):
    """Scores groups with reward functions in TRL's form."""

    def __init__(
        self,
        functions: Mapping[str, tuple[Callable[..., Any], float]],
        *,
        rows: Mapping[Split, Rows],
        max_steps: int,
        examples_per_step: float,
    ) -> None:
        funcs = [
            guard(_score_group_with(function), scores=ScoreForm.PARTIAL_GROUP, name=name)
            for name, (function, _) in functions.items()
        ]
        for name, func in zip(functions, funcs, strict=True):
            func.__name__ = name
        super().__init__(funcs=funcs, weights=[weight for _, weight in functions.values()])
        self._rows = rows
        self._max_steps = max_steps
        self._examples_per_step = examples_per_step

    async def score_group(self, states: list[vf.State]) -> None:
        """Write `reward` and `metrics` into each state.

        A rollout to which no function applies gets the mean of the others, so that its advantage is 0 and theirs do not change.
        """
        group = self._make_group(states)
        values_FR = await asyncio.gather(*(_call(func, group) for func in self.funcs))
        rewards: list[float | None] = []
        for values in zip(*values_FR, strict=True):
            applicable = [value * weight for value, weight in zip(values, self.weights, strict=True) if value is not None]
            rewards.append(sum(applicable) if applicable else None)
        scored = [reward for reward in rewards if reward is not None]
        mean = sum(scored) / len(scored) if scored else 0.0
        for index, (state, reward) in enumerate(zip(states, rewards, strict=True)):
            # NaN marks a metric without a value: verifiers adds up the metrics of rubrics, and None would raise
            metrics = {
                func.__name__: math.nan if values[index] is None else values[index]
                for func, values in zip(self.funcs, values_FR, strict=True)
            }
            unscored = {_UNSCORED: float(reward is None)} if len(scored) < len(states) else {}
            reported = {name: values[index] for name, values in group.reported.items()}
            state["reward"], state["metrics"] = (mean if reward is None else reward), {**reported, **metrics, **unscored}

    def _make_group(self, states: Sequence[vf.State]) -> _Group:
        """Return the arguments of the reward functions for the rollouts in `states`."""
        rows = [row_of(state, self._rows) for state in states]
        columns = {column for row in rows for column in row} - {"prompt", "completion", "completion_ids"}
        arguments: dict[str, Any] = {column: [row.get(column) for row in rows] for column in columns}
        arguments["prompts"] = [row["prompt"] for row in rows]
        arguments["completions"] = [_completion(state, row) for state, row in zip(states, rows, strict=True)]
        if all(_OBJECT in state for state in states):
            arguments["environments"] = [state[_OBJECT] for state in states]
        sampled = [_completion_ids(state) for state in states]
        missing = () if None not in sampled else ("completion_ids", "trainer_state")
        if not missing:
            arguments["completion_ids"] = sampled
            arguments["trainer_state"] = self._trainer_state(states)
        group = _Group(arguments=arguments, num_rollouts=len(states), missing=missing)
        arguments["log_metric"], arguments["log_extra"] = group.log_metric, group.log_extra
        return group

    def _trainer_state(self, states: Sequence[vf.State]) -> TrainerState:
        responses = [step["response"] for state in states for step in state["trajectory"]]
        versions = [version for response in responses for version, _ in getattr(response, "policy_versions", None) or []]
        step = max(versions, default=0)
        epoch = step * self._examples_per_step / len(self._rows[Split.TRAIN])
        return TrainerState(global_step=step, max_steps=self._max_steps, epoch=epoch)


def row_of(state: vf.State, rows: Mapping[Split, Rows]) -> Mapping[str, Any]:
    """Return the user's own row of the example in `state`."""
    return rows[Split(state["info"]["split"])][state["example_id"]]


def _score_group_with(function: Callable[..., Any]) -> Callable[[_Group], Any]:
    """Return a function that calls `function` with the arguments of a group that it asks for."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    async def score(group: _Group) -> Any:
        if unavailable := [name for name in group.missing if name in parameters]:
            raise ValueError(
                f"it asks for {unavailable[0]}, which a recorded rollout and a server that returns text do not have"
            )
        chosen = {name: value for name, value in group.arguments.items() if takes_all or name in parameters}
        return await _awaited(function(**chosen))

    return score


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _call(func: Callable[[_Group], Any], group: _Group) -> list[float | None]:
    """Return the values of a guarded function. After an error, which was collected, each is 0, as verifiers counts it."""
    try:
        return await func(group)
    except Exception as exc:  # noqa: BLE001  user code may raise anything
        logger.error("reward function %s: %s: %s", func.__name__, type(exc).__name__, exc)
        return [0.0] * group.num_rollouts


def _completion(state: vf.State, row: Mapping[str, Any]) -> Any:
    """Return what the policy and its tools wrote: a text for a prompt of text, else messages in the form of TRL."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in state["completion"] or []:
        plain = {"role": message.role, "content": message.content or ""}
        if calls := getattr(message, "tool_calls", None):
            names |= {call.id: call.name for call in calls}
            plain["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": _parsed(call.arguments)}} for call in calls
            ]
        if message.role == "tool":
            plain["name"] = names.get(message.tool_call_id, "")
        messages.append(plain)
    return "".join(message["content"] for message in messages) if isinstance(row["prompt"], str) else messages


def _parsed(arguments: str) -> Any:
    """Return the arguments of a tool call as a dictionary, or as the model's text if it is not JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _completion_ids(state: vf.State) -> list[int] | None:
    """Return the tokens after the prompt, those of tools' answers included; None if they are not known."""
    tokens = [step["response"] and step["response"].message.tokens for step in state["trajectory"]]
    if not tokens or None in tokens:
        return None if tokens else []
    return [*tokens[-1].prompt_ids, *tokens[-1].completion_ids][len(tokens[0].prompt_ids) :]


class FunctionToolEnv(vf.StatefulToolEnv):
    """Gives the model plain functions as tools, and the public methods of an object that is made for each rollout."""

    def __init__(
        self,
        *,
        tools: Sequence[Callable[..., Any]],
        factory: Callable[[], Any] | None,
        rows: Mapping[Split, Rows],
        **kwargs: Any,
    ) -> None:
        self._factory = factory
        self._rows = rows
        probe = factory() if factory is not None else None
        self._methods = {
            name: getattr(probe, name)
            for name, _ in inspect.getmembers(type(probe), inspect.isfunction)
            if not name.startswith("_") and name not in _NOT_TOOLS
        }
        super().__init__(tools=[*tools, *self._methods.values()], error_formatter=_describe_tool_error, **kwargs)
        self.tool_map |= {name: _method_of_owner(name) for name in self._methods}

    async def setup_state(self, state: vf.State) -> vf.State:
        """Make the rollout's object. The text that its `reset` returns is added to the last message of the prompt."""
        if self._factory is None:
            return state
        state[_OBJECT] = self._factory()
        observation = await _awaited(state[_OBJECT].reset(**row_of(state, self._rows)))
        if observation is not None:
            last = state["prompt"][-1]
            added = last.model_copy(update={"content": f"{last.content}{observation}"})
            state["prompt"] = [*state["prompt"][:-1], added]
        return state

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: vf.Messages, state: vf.State, **kwargs: Any
    ) -> dict[str, Any]:
        """Add the object of a tool that is a method."""
        return {**tool_args, _OWNER: state[_OBJECT]} if tool_name in self._methods else tool_args


def _method_of_owner(name: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return getattr(arguments.pop(_OWNER), name)(**arguments)

    return call


def _describe_tool_error(error: Exception) -> str:
    """Return what the model reads of an error in its call."""
    return f"{type(error).__name__}: {error}"


async def _get_rewards(environments: Sequence[Any]) -> list[Any]:
    """Return the reward that each rollout's object gives, as a reward function."""
    return [await _awaited(own.get_reward()) for own in environments]


def load_environment(
    *,
    rows: Mapping[Split, Rows],
    reward_funcs: Mapping[str, tuple[Callable[..., Any], float]],
    tools: Sequence[Callable[..., Any]],
    environment_factory: Callable[[], Any] | None,
    max_turns: int,
    max_steps: int,
    examples_per_step: float,
    made_of: Mapping[str, Any] | None = None,
) -> vf.Environment:
    """Return the environment.

    Args:
        rows: the training data, and the evaluation data if there are any.
        reward_funcs: each with its weight, by name.
        environment_factory: makes the object of a rollout, whose methods are tools.
        max_turns: of a rollout with tools; -1: any number.
        examples_per_step: examples that a step trains on.
        made_of: not used: by it the configuration tells people what the environment is made of.
    """
    functions = dict(reward_funcs)
    kind = type(environment_factory()) if environment_factory is not None else object
    if hasattr(kind, "get_reward"):
        functions[kind.__name__] = _get_rewards, 1.0
    rubric = FunctionRubric(functions, rows=rows, max_steps=max_steps, examples_per_step=examples_per_step)
    data = {split: _to_dataset(own_rows, split) for split, own_rows in rows.items()}
    common: dict[str, Any] = {"dataset": data[Split.TRAIN], "eval_dataset": data.get(Split.EVAL), "rubric": rubric}
    if not tools and environment_factory is None:
        return vf.SingleTurnEnv(**common)
    return FunctionToolEnv(tools=tools, factory=environment_factory, rows=rows, max_turns=max_turns, **common)


def _to_dataset(rows: Rows, split: Split) -> Dataset:
    """Return the examples in verifiers' form. Reward functions get the user's own rows; here a digest stands for their columns."""
    columns: dict[str, list[Any]] = {"prompt": [], "answer": [], "info": []}
    for row in rows:
        rest = {name: value for name, value in row.items() if name != "prompt"}
        columns["prompt"].append(row["prompt"])
        columns["answer"].append(row["answer"] if isinstance(row.get("answer"), str) else "")
        columns["info"].append(json.dumps({"split": split, "columns": digest_records([rest])}))
    return Dataset.from_dict(columns)
