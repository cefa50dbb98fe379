"""Provides `trivet.evaluate`: the command `eval` for Python programs, on a server that it starts or on a running one."""

import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from trivet.config.findings import Findings
from trivet.config.layout import RunLayout
from trivet.config.load import load_sources
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.errors import ConfigError, RoleFailed
from trivet.evaluation.plan import results_layout
from trivet.evaluation.scores import Summary
from trivet.evaluation.targets import complete_steps, read_origin
from trivet.library.arguments import Environment, EvalArguments, entries_of, name_of_environment, written_values
from trivet.library.callbacks import new_summaries
from trivet.library.functions import FunctionFiles
from trivet.library.process import RunProcess
from trivet.library.trainers import shown_progress
from trivet.process.sockets import ReservedPorts
from trivet.secret import share_secret
from trivet.weights.adapters import ADAPTER_CONFIG, is_adapter

_POLL_INTERVAL_S = 0.2
_HOST = "127.0.0.1"
_START_TIMEOUT_S = 1800.0
"""Longest wait for the server that `evaluate` starts. Large models load for minutes; a server that ends is noticed at once."""


def evaluate(
    model: str | Path | None = None,
    env: Environment | None = None,
    args: EvalArguments | None = None,
    *,
    env_args: Mapping[str, Any] | None = None,
    weights_dir: str | Path | None = None,
    base_url: str | None = None,
    inference: InferenceConfig | Mapping[str, Any] | None = None,
    progress: bool = True,
) -> list[Summary]:
    """Measure a model, or the policies of a run, on an environment.

    Args:
        model: Hugging Face name or a directory; None: the model that the run of `weights_dir` started from.
        env: id of an installed environment, or a function that returns one; None: the environments of that run.
        args: the arguments of the evaluation; None: the defaults of `eval`.
        env_args: passed to load_environment, or to the function.
        weights_dir: the directory `weights` of a run: each of its policies is measured, and the start model.
        base_url: the address of a running server; None: a server is started for `model`, and ended afterwards.
        inference: keys of [inference] for the server that is started.
        progress: show in a terminal or a notebook how many results there are.

    Returns the scores of each policy and environment, as in `summary.json`. The message of a RoleFailed has the last lines of the
    evaluation or server that failed.
    """
    args = args or EvalArguments()
    layout = results_layout(args.model_copy(update={"weights_dir": None if weights_dir is None else Path(weights_dir)}))
    functions = FunctionFiles(layout.root)
    started = time.time()
    with ExitStack() as stack:
        server = None
        variables: dict[str, str] = {}
        if base_url is None and not {"client", "resume_path"} & args.model_fields_set:
            config = _plan_server(model, weights_dir, inference or {}, stack)
            variables = share_secret(RunLayout(config.output_dir), environ={})
            server = stack.enter_context(RunProcess("trivet.inference.main", config, variables=variables))
            base_url = f"http://{_HOST}:{config.server.port}/v1"
        planned = _plan(env, args, functions, env_args=env_args or {}, weights_dir=weights_dir, base_url=base_url)
        if server is not None:
            update = {"wait_for_ready_timeout": _START_TIMEOUT_S}
            planned = planned.model_copy(update={"client": planned.client.model_copy(update=update)})
        functions.write()
        process = stack.enter_context(RunProcess("trivet.evaluation.main", planned, variables=variables))
        with shown_progress(None, is_wanted=progress) as show:
            while process.exit_code is None:
                show(len(_new_summaries(layout, since=started)), "evaluating")
                if server is not None and server.exit_code is not None:
                    raise RoleFailed(f"the server ended with exit code {server.exit_code}:\n{server.last_output()}")
                time.sleep(_POLL_INTERVAL_S)
        process.require_success()
    return _new_summaries(layout, since=started)


def _plan(
    env: Environment | None,
    args: EvalArguments,
    functions: FunctionFiles,
    *,
    env_args: Mapping[str, Any],
    weights_dir: str | Path | None,
    base_url: str | None,
) -> EvalConfig:
    """Return the configuration of the command `eval` that the arguments of `evaluate` describe."""
    values: dict[str, Any] = {}
    if env is not None:
        path = env if isinstance(env, str) else functions.path_of(env, argument="env")
        values["env"] = [{"id": path, "name": name_of_environment(env), "args": dict(env_args)}]
    if weights_dir is not None:
        values["weights_dir"] = str(weights_dir)
    if base_url is not None:
        values["client"] = {"base_url": [base_url]}
    sources = [entries_of(written_values(args), origin="EvalConfig"), entries_of(values, origin="evaluate")]
    return load_sources(EvalConfig, sources, Findings()).config


def _plan_server(
    model: str | Path | None, weights_dir: str | Path | None, inference: InferenceConfig | Mapping[str, Any], stack: ExitStack
) -> InferenceConfig:
    """Return the configuration of a server for this evaluation. Its port and its directory are freed when `stack` closes."""
    weights = None if weights_dir is None else Path(weights_dir).absolute()
    name = model or read_origin(weights).model_name
    if name is None:
        raise ConfigError("evaluate() needs a model, the weights_dir of a run, or the base_url of a server")
    adapters = [] if weights is None else [path for path in complete_steps(weights).values() if is_adapter(path)]
    ranks = [json.loads((path / ADAPTER_CONFIG).read_bytes())["r"] for path in adapters]
    values = {
        "output_dir": stack.enter_context(tempfile.TemporaryDirectory(prefix="trivet-eval-")),
        "model": {"name": str(name)},
        "server": {
            "host": _HOST,
            "port": stack.enter_context(ReservedPorts()).reserve(_HOST, preferred=0),
            **({"weight_dirs": [str(weights)]} if weights is not None else {}),
        },
        **({"enable_lora": True, "max_lora_rank": max(ranks)} if ranks else {}),
    }
    user_values = written_values(inference) if isinstance(inference, InferenceConfig) else inference
    sources = [entries_of(values, origin="evaluate"), entries_of(user_values, origin="evaluate(inference=…)")]
    return load_sources(InferenceConfig, sources, Findings()).config


def _new_summaries(layout: RunLayout, *, since: float) -> list[Summary]:
    """Return the scores that were written since the Unix time `since`, sorted by step and environment."""
    found = [msgspec.json.decode(path.read_bytes(), type=Summary) for path in new_summaries(layout, since=since)]
    return sorted(found, key=lambda summary: (summary.step, summary.env))
