"""Checks that a configuration names only files that this machine has.

They are apart from the other checks, because a configuration can be read where the model is not.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from trivet.config.chat_template import read_chat_template
from trivet.config.checks.sft import data_problems
from trivet.config.layout import RunLayout
from trivet.config.loading.findings import ROOT, Key
from trivet.config.loading.keys import Shape, all_keys, value_at
from trivet.config.loading.user_paths import usable_path
from trivet.config.model_files import choose_targets, find_linear_modules, find_weight_files
from trivet.config.sections.base import Section
from trivet.config.sections.evaluation import EvalConfig
from trivet.config.sections.model import TrainerModelConfig
from trivet.config.sections.rl import RLConfig
from trivet.config.sections.sft import SftConfig
from trivet.config.sections.trainer import TrainerConfig, TrainingConfig
from trivet.config.vocabulary import read_num_rows, read_tokens, require_rows
from trivet.errors import ConfigError

LOCAL_ROOTS = ("models", "outputs")
"""First parts of a name that mean a directory of this project, even before it exists."""

MADE_BY = {
    "models/smollm2": "uv run python -m trivet.examples.smollm2",
    "models/examples": "the three commands at the top of configs/examples/sft.toml",
    "outputs/quickstart": "uv run trivet quickstart",
}
"""The command that makes each model that our own configurations start from."""


def file_problems(config: Section) -> Iterator[str]:
    """Yield a problem for each file that `config` names and this machine does not have."""
    if isinstance(config, EvalConfig):
        if config.weights_dir is not None and not config.weights_dir.is_dir() and not config.watcher:
            yield (
                f"{ROOT.weights_dir} ({config.weights_dir}) is not a directory; give the weights/ of a run, or set"
                f" {ROOT.watcher} to wait for it"
            )
        return
    if isinstance(config, TrainerConfig) and config.data.replay is not None:
        yield from _replay_problems(config.data.replay, output_dir=config.output_dir)
    if isinstance(config, SftConfig) and config.bench is None:
        yield from data_problems(config)
    trainer = config.trainer if isinstance(config, RLConfig) else config
    if isinstance(trainer, TrainingConfig):
        at = ROOT if trainer is config else ROOT.trainer
        yield from _target_problems(trainer.model, at)
        yield from _vocabulary_problems(trainer, at, is_served=trainer is not config)
    yield from _template_problems(config)
    seen: set[str] = set()
    for path, key in all_keys(type(config)):
        if key.shape is Shape.VALUE and path[-1] == "name" and path[-2:-1] in (("model",), ("tokenizer",)):
            name = value_at(config, path)
            if isinstance(name, str) and name not in seen:
                seen.add(name)
                yield from _model_problems(name, Key(*path), is_model=path[-2] == "model")


def _replay_problems(replay: Path, *, output_dir: Path) -> Iterator[str]:
    if not RunLayout(replay).batches.is_dir():
        yield f"{ROOT.data.replay} ({replay}) holds no batches/: give the output_dir of a run with trainer.data.record = true"
    elif replay.resolve() == output_dir.resolve():
        yield f"{ROOT.data.replay} ({replay}) is output_dir: a replay is a run of its own; choose another {ROOT.output_dir}"


def _target_problems(model: TrainerModelConfig, at: Key) -> Iterator[str]:
    """Check the modules of an adapter against the model's files, if they are here; else building the model does."""
    if model.lora is None:
        return
    modules = find_linear_modules(model.name)
    if modules is not None and modules.names:
        try:
            choose_targets(model.lora.target_modules, modules=modules, key=str(at.model.lora.target_modules))
        except ConfigError as exc:
            yield str(exc)


def _vocabulary_problems(trainer: TrainingConfig, at: Key, *, is_served: bool) -> Iterator[str]:
    """Check that every token has a row, for models and tokenizers that are directories here; else the trainer does."""
    name = trainer.model.name
    num_rows = read_num_rows(Path(name))
    published = trainer.tokenizer.name or name
    for tokenizer in sorted({name, published} if is_served else {published}):
        try:
            require_rows(
                read_tokens(Path(tokenizer)), num_rows or sys.maxsize, model=name, tokenizer=tokenizer, key=str(at.model.name)
            )
        except ConfigError as exc:
            yield str(exc)


def _template_problems(config: Section) -> Iterator[str]:
    seen: set[str] = set()
    for path, _ in all_keys(type(config)):
        template = value_at(config, path) if path[-1] == "chat_template" else None
        if isinstance(template, str) and template not in seen:
            seen.add(template)
            try:
                read_chat_template(template, key=str(Key(*path)))
            except ConfigError as exc:
                yield str(exc)


def _model_problems(name: str, key: Key, *, is_model: bool) -> Iterator[str]:
    try:
        path = usable_path(name, key=str(key))
    except ConfigError as exc:
        yield str(exc)
        return
    parts = name.split("/")
    looks_local = name.startswith((".", "/", "~")) or len(parts) > 2 or parts[0] in LOCAL_ROOTS or path.exists()
    if not looks_local:
        return
    if not path.is_dir():
        maker = next((command for directory, command in MADE_BY.items() if path.is_relative_to(directory)), None)
        remedy = f"it is made by {maker}" if maker else "give a model directory, or a Hugging Face name such as Qwen/Qwen3-0.6B"
        yield f"{key} ({name}) is not a directory; {remedy}"
    elif is_model and not (path / "config.json").is_file():
        yield f"{key} ({name}) has no config.json: it is not a model directory; give another"
    elif is_model:
        try:
            find_weight_files(path, key=str(key))
        except ConfigError as exc:
            yield str(exc)
