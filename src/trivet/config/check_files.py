"""Checks that this machine has all files that a configuration names.

These checks are separate from the others, because a configuration can be read on a machine without the model.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from trivet.config.dump import literal
from trivet.config.findings import ROOT, Findings, Key
from trivet.config.keys import Shape, all_keys, value_at
from trivet.config.layout import RunLayout
from trivet.config.model_files import (
    choose_targets,
    find_linear_modules,
    find_weight_files,
    read_chat_template,
    read_num_embeddings,
    read_num_experts,
    read_tokens,
    require_embeddings,
)
from trivet.config.schema.base import Section
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import ConversationsConfig, FakeDataConfig, SftConfig
from trivet.config.schema.trainer import TrainerConfig, TrainingConfig
from trivet.config.user_input import usable_path
from trivet.errors import ConfigError

_LOCAL_ROOTS = ("models", "outputs")
"""First parts of a model's name that stand for a directory of this project, even if it does not exist yet."""
_MADE_BY = {
    "models/smollm2": "uv run python -m trivet.examples.smollm2",
    "models/examples": "the three commands at the top of configs/examples/sft.toml",
    "outputs/quickstart": "uv run trivet quickstart",
}
"""The command that makes each model with which an example configuration starts, by the model's directory."""
_TRACKER_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "trackio": ("trackio", "trackio"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "opentelemetry": ("opentelemetry.exporter.otlp.proto.http", "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"),
}
"""The module that each section of [tracking] needs, and what installs it."""
_DATA_ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".csv")


def require_files(config: Section) -> None:
    """Raise a ConfigError that lists all problems of `file_problems`."""
    findings = Findings()
    for problem in file_problems(config):
        findings.refuse(problem)
    findings.raise_problems()


def file_problems(config: Section) -> Iterator[str]:
    """Yield a problem for each file, directory or package that `config` needs, and that is missing or cannot be used."""
    yield from _tracker_problems(config)
    if isinstance(config, EvalConfig):
        if config.weights_dir is not None and not config.weights_dir.is_dir() and not config.watcher:
            yield (
                f"{ROOT.weights_dir} ({config.weights_dir}) is not a directory; give the weights/ of a run, or set"
                f" {ROOT.watcher} to wait for it"
            )
        return
    if isinstance(config, TrainerConfig) and (replay := config.data.replay) is not None:
        if not RunLayout(replay).batches.is_dir():
            yield f"{ROOT.data.replay} ({replay}) holds no batches/: give the output_dir of a run with trainer.data.record = true"
        elif replay.resolve() == config.output_dir.resolve():
            yield f"{ROOT.data.replay} ({replay}) is output_dir: a replay is a run of its own; choose another {ROOT.output_dir}"
    if isinstance(config, SftConfig) and config.bench is None:  # with bench the data are made up
        yield from _data_problems(config.data, ROOT.data)
        if config.val is not None:
            yield from _data_problems(config.val.data, ROOT.val.data)
    if isinstance(config, RLConfig):
        yield from _training_problems(config.trainer, ROOT.trainer, is_served=True)
    elif isinstance(config, TrainingConfig):
        yield from _training_problems(config, ROOT, is_served=False)
    yield from _name_problems(config)


def _tracker_problems(config: Section) -> Iterator[str]:
    """Check that the packages of the trackers are installed. A run's roles have the sections too, and each is named once."""
    missing: set[str] = set()
    for path, _ in all_keys(type(config)):
        name = str(path[-1])
        if path[-2:-1] == ("tracking",) and value_at(config, path) is not None and name not in missing:
            module, packages = _TRACKER_PACKAGES[name]
            if not _is_installed(module):
                missing.add(name)
                yield f"[{Key(*path)}] needs a package that is not installed: `uv pip install {packages}`, or remove the section"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def _data_problems(config: ConversationsConfig | FakeDataConfig, at: Key) -> Iterator[str]:
    """Check that local data exist. A data set of the hub is checked by the command when it loads the data."""
    if isinstance(config, FakeDataConfig) or not looks_local(config.name):
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
        names = literal(config.subsets)
        yield f"{at.subsets} ({names}) exist in a directory or on the hub, and {at.name} is a file; remove {at.subsets}"


def looks_local(name: str) -> bool:
    """Return whether a data set's name stands for a file or directory, existing or not, and not for a data set of the hub."""
    try:
        exists = Path(name).exists()
    except (OSError, ValueError):  # the name cannot be a path: it is too long or contains a NUL
        exists = False
    return exists or name.startswith((".", "/", "~")) or name.endswith(_DATA_ENDINGS) or name.count("/") > 1


def _training_problems(trainer: TrainingConfig, at: Key, *, is_served: bool) -> Iterator[str]:
    """Check an adapter's modules and the tokens against the model's local files. Without such files the trainer checks them."""
    name, lora = trainer.model.name, trainer.model.lora
    modules = None if lora is None else find_linear_modules(name)
    if lora is not None and modules is not None and modules.names:
        try:
            choose_targets(lora.target_modules, modules=modules, key=str(at.model.lora.target_modules))
        except ConfigError as exc:
            yield str(exc)
    if isinstance(trainer, TrainerConfig) and trainer.router_replay and read_num_experts(Path(name)) == 0:
        yield f"{at.router_replay} is for a mixture of experts, and {at.model.name} ({name}) has none; remove {at.router_replay}"
    num_embeddings = read_num_embeddings(Path(name)) or sys.maxsize
    published = trainer.tokenizer.name or name
    for tokenizer in sorted({name, published} if is_served else {published}):
        try:
            require_embeddings(
                read_tokens(Path(tokenizer)), num_embeddings, model=name, tokenizer=tokenizer, key=str(at.model.name)
            )
        except ConfigError as exc:
            yield str(exc)


def _name_problems(config: Section) -> Iterator[str]:
    """Check each chat template, and each name of a model or a tokenizer. A value that several keys have is checked once."""
    seen: set[tuple[bool, str]] = set()
    for path, key in all_keys(type(config)):
        is_template = path[-1] == "chat_template"
        is_name = key.shape is Shape.VALUE and path[-1] == "name" and path[-2:-1] in (("model",), ("tokenizer",))
        value = value_at(config, path) if is_template or is_name else None
        if not isinstance(value, str) or (is_template, value) in seen:
            continue
        seen.add((is_template, value))
        here = str(Key(*path))
        try:
            if is_template:
                read_chat_template(value, key=here)
            elif problem := _model_problem(value, here, is_model=path[-2] == "model"):
                yield problem
        except ConfigError as exc:
            yield str(exc)


def _model_problem(name: str, key: str, *, is_model: bool) -> str | None:
    """Return the problem of a local model or tokenizer. None if there is none, or if `name` stands for a model of the hub.

    Raises:
        ConfigError: the name cannot be a path, or trainer and server would read different files of the directory.
    """
    path = usable_path(name, key=key)
    parts = name.split("/")
    looks_like_path = name.startswith((".", "/", "~")) or len(parts) > 2 or parts[0] in _LOCAL_ROOTS or path.exists()
    if not looks_like_path:
        return None
    if not path.is_dir():
        command = next((made_by for directory, made_by in _MADE_BY.items() if path.is_relative_to(directory)), None)
        remedy = (
            f"it is made by {command}" if command else "give a model directory, or a Hugging Face name such as Qwen/Qwen3-0.6B"
        )
        return f"{key} ({name}) is not a directory; {remedy}"
    if is_model and not (path / "config.json").is_file():
        return f"{key} ({name}) has no config.json: it is not a model directory; give another"
    if is_model:
        find_weight_files(path, key=key)
    return None
