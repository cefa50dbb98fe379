"""Reward functions, prompts and tools are checked under the user's names before anything starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from trivet.errors import ConfigError
from trivet.library.arguments import RLArguments, plan_run
from trivet.library.rewards import RewardTask, read_rows
from trivet.process.imports import import_by_path

ROWS = [{"prompt": "2+3 is", "answer": "5"}, {"prompt": "1+1 is", "answer": "2"}]
CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]


def exact(completions, answer, **kwargs):
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def brief(completions):
    return [-len(completion) for completion in completions]


class Board:
    def reset(self, **columns) -> None: ...

    def look(self) -> str:
        """Return what is there."""
        return "nothing"

    def get_reward(self) -> float:
        return 1.0


def plan(tmp_path: Path, arguments: dict[str, Any] | None = None, **task: Any) -> Any:
    args = RLArguments(output_dir=str(tmp_path / "outputs"), **(arguments or {}))
    return plan_run("models/x", None, args, env_args={}, task=RewardTask(**task))


def test_functions_and_prompts_become_an_environment_of_the_run(tmp_path: Path) -> None:
    arguments = {"reward_weights": [1.0, 0.5], "eval_strategy": "steps", "max_steps": 7}
    planned = plan(tmp_path, arguments, reward_funcs=[exact, brief], train_dataset=ROWS, eval_dataset=ROWS[:1])
    [trained], evaluated = planned.config.orchestrator.env, planned.config.orchestrator.eval
    assert (trained.label, trained.args["made_of"]["reward_funcs"]) == ("exact", {"exact": 1.0, "brief": 0.5})
    assert evaluated is not None
    assert evaluated.env[0].program == trained.program
    planned.functions.write()
    env = import_by_path(trained.id)(**trained.args)
    assert [row["prompt"] for row in env.get_dataset()] == [row["prompt"] for row in ROWS]
    assert len(env.get_eval_dataset()) == 1
    assert not planned.config.inference.model.enable_auto_tool_choice


def test_the_file_is_named_by_the_functions_and_not_by_the_data(tmp_path: Path) -> None:
    def paths(*functions: Callable[..., Any], rows: list[dict[str, Any]] = ROWS) -> str:
        return plan(tmp_path, reward_funcs=list(functions), train_dataset=rows).config.orchestrator.env[0].id

    assert paths(exact) == paths(exact, rows=ROWS[:1])
    assert paths(exact) != paths(exact, brief)


def test_tools_turn_the_servers_parser_on(tmp_path: Path) -> None:
    planned = plan(tmp_path, {"max_tool_calling_iterations": 3}, train_dataset=CHATS, environment_factory=Board)
    assert planned.config.inference.model.enable_auto_tool_choice
    planned.functions.write()
    [trained] = planned.config.orchestrator.env
    env = import_by_path(trained.id)(**trained.args)
    assert ([tool.name for tool in env.tool_defs], env.max_turns) == (["look"], 4)
    assert trained.label == "rewards"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
def test_data_are_read_from_a_file_or_a_saved_directory(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in CHATS))
    else:
        dataset = Dataset.from_list(CHATS)
        dataset.to_parquet(path) if suffix else dataset.save_to_disk(path)
    assert list(read_rows(path, argument="train_dataset")) == CHATS
    assert list(read_rows(Dataset.from_list(CHATS), argument="train_dataset")) == CHATS


def needs_more(completions, answer, solution):
    return []


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"train_dataset": [{"question": "x"}]}, r"train_dataset\[0\] has no column prompt, only question"),
        (
            {"train_dataset": [{"prompt": "x"}, {"prompt": 3}]},
            r"train_dataset\[1\]: prompt must be a text or a list of messages",
        ),
        ({"train_dataset": [ROWS[0], CHATS[0]]}, "some prompts are texts and some are lists"),
        ({"train_dataset": []}, "train_dataset has no examples"),
        ({"train_dataset": None}, "train_dataset must be a list of dictionaries, a datasets.Dataset or a path, got NoneType"),
        ({"train_dataset": Dataset.from_list(ROWS).to_iterable_dataset()}, "of a stream take a part"),
        ({"train_dataset": DatasetDict(train=Dataset.from_list(ROWS))}, r"give one, as train_dataset=data\['train'\]"),
        ({"train_dataset": "nowhere.jsonl"}, "train_dataset = 'nowhere.jsonl'"),
        (
            {"eval_dataset": [{"prompt": "x"}]},
            "exact asks for 'answer', and eval_dataset has no such column; it has only prompt",
        ),
        ({"reward_funcs": needs_more}, "needs_more asks for 'solution', and train_dataset has no such column; it has answer"),
        ({"reward_funcs": ["org/reward-model"]}, "'org/reward-model' is no function. To score with a model, load it inside"),
        ({"reward_funcs": []}, "reward_funcs is empty"),
        ({"tools": [exact]}, "tools need conversations"),
        ({"tools": [exact], "train_dataset": CHATS}, "tools: exact must be a function with a docstring"),
        ({"tools": [Board], "train_dataset": CHATS}, "a class whose methods are tools is the environment_factory"),
        ({"environment_factory": Exception, "train_dataset": CHATS}, r"Exception needs the method reset\(\*\*columns\)"),
        ({"reward_funcs": lambda completion: 1.0}, "reward asks for 'completion', and train_dataset has no such column"),
    ],
)
def test_a_wrong_argument_is_refused_under_its_name(task: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, **{"reward_funcs": exact, "train_dataset": ROWS, **task})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_weights": [1.0, 2.0]}, "reward_weights has 2 weights for 1 reward_funcs"),
        ({"eval_strategy": "steps"}, 'eval_strategy "steps" needs eval_dataset'),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, arguments, reward_funcs=exact, train_dataset=ROWS)


def test_a_missing_or_newer_verifiers_is_said_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet.library.rewards.require_release", lambda env_id: (0, 4))
    with pytest.raises(ConfigError, match=r"verifiers 0\.4 has no v0 API; run: pip install 'verifiers==0\.3\.1' && "):
        plan(tmp_path, reward_funcs=exact, train_dataset=ROWS)
