"""Checks that a configuration names only files that this machine has.

They are apart from the other checks, because a configuration can be read where the model is not.
"""

import sys
from collections.abc import Iterator
from math import isclose
from pathlib import Path

from trivet.config.dump import literal
from trivet.config.findings import ROOT, Key
from trivet.config.keys import Shape, all_keys, value_at
from trivet.config.layout import RunLayout
from trivet.config.model_files import (
    choose_targets,
    find_linear_modules,
    find_weight_files,
    read_chat_template,
    read_num_rows,
    read_tokens,
    require_rows,
)
from trivet.config.schema.base import Section
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.model import TrainerModelConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import ConversationsConfig, FakeDataConfig, SftConfig
from trivet.config.schema.trainer import TrainerConfig, TrainingConfig
from trivet.config.user_input import usable_path
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


FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".csv")


def sft_problems(config: SftConfig) -> Iterator[str]:
    """Yield the problems of supervised fine-tuning that a trainer cannot have."""
    if isinstance(config.data, FakeDataConfig):
        if config.max_steps is None:
            yield f'{ROOT.data.type} "fake" has no end: set {ROOT.max_steps}'
    else:
        yield from _mixture_problems(config.data, ROOT.data)
    if config.val is not None:
        yield from _mixture_problems(config.val.data, ROOT.val.data)


def data_problems(config: SftConfig) -> Iterator[str]:
    """Yield a problem for each file of data that is not on this machine. Names of the hub are left to the command."""
    if config.bench is not None:
        return  # made-up rows
    if not isinstance(config.data, FakeDataConfig):
        yield from _place_problems(config.data, ROOT.data)
    if config.val is not None:
        yield from _place_problems(config.val.data, ROOT.val.data)


def looks_local(name: str) -> bool:
    """Return whether a data set's name means a file or a directory, even before it exists, and not one of the hub."""
    return name.startswith((".", "/", "~")) or name.endswith(FILE_ENDINGS) or name.count("/") > 1 or _exists(name)


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # no path: too long, or with a NUL
        return False


def _mixture_problems(config: ConversationsConfig, at: Key) -> Iterator[str]:
    subsets, splits = config.subsets, config.splits
    for key, names in (("subsets", subsets), ("splits", splits)):
        if names is not None and (not names or "" in names):
            yield f"{at[key]} must name at least one, and no name may be empty, got {literal(names)}; remove the key for all in one"
            return
    if subsets is not None and splits is not None and len(subsets) != len(splits):
        yield (
            f"{at.splits} has {len(splits)} names for {len(subsets)} {at.subsets}: {len(splits)} != {len(subsets)};"
            f" give one split for each subset, in their order"
        )
        return
    num_sources = max(len(subsets or ()), len(splits or ()), 1)
    chances = config.probabilities
    if chances is None:
        return
    if len(chances) != num_sources:
        yield (
            f"{at.probabilities} has {len(chances)} numbers for {num_sources} sources: {len(chances)} != {num_sources};"
            f" give one for each of {at.subsets} or {at.splits}, in their order"
        )
    elif min(chances) <= 0:
        yield f"{at.probabilities} must be > 0, got {literal(chances)}; remove a source that is not wanted"
    elif not isclose(sum(chances), 1.0, abs_tol=1e-6):
        scaled = ", ".join(f"{chance / sum(chances):.4g}" for chance in chances)
        yield f"{at.probabilities} must sum to 1, got {' + '.join(map(str, chances))} = {sum(chances):g}; try [{scaled}]"


def _place_problems(config: ConversationsConfig, at: Key) -> Iterator[str]:
    if not looks_local(config.name):
        return
    try:
        path = usable_path(config.name, key=str(at.name))
    except ConfigError as exc:
        yield str(exc)
        return
    if not path.exists():
        yield (
            f"{at.name} ({config.name}) does not exist: give a file (JSONL, parquet, arrow or CSV), a data set directory or a"
            f" name of the hub"
        )
    elif path.is_file() and config.subsets is not None:
        yield (
            f"{at.subsets} ({literal(config.subsets)}) exist in a directory or on the hub, and {at.name} is a file; remove"
            f" {at.subsets}"
        )
