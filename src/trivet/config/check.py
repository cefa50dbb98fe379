"""Checks over several keys of a validated configuration. They run before anything is started.

A check yields the text of each problem, which stops the command, or notice, which does not. Keys in it are placeholders:
`findings.Key`. What looks at files is in `check_files`.
"""

from collections.abc import Iterator

from trivet.config.check_files import sft_problems
from trivet.config.check_roles import (
    engine_notices,
    inference_problems,
    offline_problems,
    orchestrator_notices,
    orchestrator_problems,
    replicas_problem,
    sampling_notices,
    tensor_parallel_problem,
    training_problems,
)
from trivet.config.dump import literal
from trivet.config.findings import ROOT, Findings
from trivet.config.schema.base import Section
from trivet.config.schema.deployment import DeploymentConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.model import DebugModelConfig, LoRAConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainingConfig


def check(config: Section, findings: Findings) -> None:
    """Check everything that concerns more than one key of `config`."""
    for problem in _problems(config):
        findings.refuse(problem)
    for notice in _notices(config):
        findings.notice(notice)


def _problems(config: Section) -> Iterator[str]:
    if isinstance(config, RLConfig):
        yield from run_problems(config)
    elif isinstance(config, OrchestratorConfig):
        yield from orchestrator_problems(config)
    elif isinstance(config, TrainingConfig):
        yield from training_problems(config)
        if isinstance(config, SftConfig):
            yield from sft_problems(config)
    elif isinstance(config, InferenceConfig):
        yield from inference_problems(config)
    elif isinstance(config, EvalConfig):
        yield from offline_problems(config)


def _notices(config: Section) -> Iterator[str]:
    if isinstance(config, RLConfig):
        yield from run_notices(config)
    elif isinstance(config, OrchestratorConfig):
        yield from orchestrator_notices(config)


TRAINER, ORCHESTRATOR = ROOT.trainer, ROOT.orchestrator
INFERENCE, TEACHER_INFERENCE = ROOT.inference, ROOT.teacher_inference


def run_problems(config: RLConfig) -> Iterator[str]:
    """Yield the problems of a run: those of each role, and those between roles."""
    yield from training_problems(config.trainer, TRAINER)
    if config.trainer.bench is not None:
        return  # the trainer alone is started
    if config.trainer.data.fake is not None:
        yield f"{TRAINER.data.fake} trains without orchestrator and servers: give it to `uv run trainer` as data.fake"
    if config.trainer.data.replay is not None:
        yield (
            f"{TRAINER.data.replay} ({config.trainer.data.replay}) trains without orchestrator and servers: give it to"
            " `uv run trainer` as data.replay"
        )
    yield from _layout_problems(config)
    yield from orchestrator_problems(config.orchestrator, ORCHESTRATOR)
    if config.inference is not None:
        yield from inference_problems(config.inference, INFERENCE)
        yield from _length_problems(config, config.inference)
        yield from _adapter_problems(config.trainer.model.lora, config.inference)
    yield from _sleep_problems(config)
    yield from _port_problems(config)
    yield from _teacher_problems(config)
    yield from _node_problems(config) if config.deployment.is_multi_node else _gpu_problems(config)
    trainer_len, orchestrator_len = config.trainer.model.seq_len, config.orchestrator.seq_len
    if trainer_len < orchestrator_len:
        yield (
            f"{TRAINER.model.seq_len} ({trainer_len}) must be >= {ORCHESTRATOR.seq_len} ({orchestrator_len}), which packs rows"
            f" of that length; raise {TRAINER.model.seq_len}, or set {ROOT.seq_len} for both"
        )


def _sleep_problems(config: RLConfig) -> Iterator[str]:
    """Check that the roles take turns, and that nothing is generated while the server sleeps."""
    sleeps = config.orchestrator.sleep_servers
    if config.inference is not None and sleeps != (sleeps := config.inference.sleep_while_training):
        yield (
            f"{ORCHESTRATOR.sleep_servers} ({literal(not sleeps)}) must be {INFERENCE.sleep_while_training} ({literal(sleeps)});"
            f" remove {ORCHESTRATOR.sleep_servers}"
        )
    if not sleeps:
        return
    # Servers that the run does not start are told to sleep by the orchestrator's own key.
    cause = INFERENCE.sleep_while_training if config.inference is not None else ORCHESTRATOR.sleep_servers
    if not config.trainer.release_gpu_memory:
        remedy = f"remove {TRAINER.release_gpu_memory}" if config.inference is not None else "set it to true"
        yield f"{TRAINER.release_gpu_memory} (false) must be {cause} (true); {remedy}"
    key = f"{cause} = true"
    if level := config.orchestrator.max_async_level:
        yield (
            f"{key} needs {ROOT.max_async_level} = 0, got {level}: at a higher level the server generates while the trainer"
            f" learns; set {ROOT.max_async_level} = 0, or remove {cause}"
        )
    for section, what in ((config.orchestrator.eval, ORCHESTRATOR.eval), (config.orchestrator.val, ORCHESTRATOR.val)):
        if section is not None:
            yield (
                f"[{what}] generates while the trainer learns, and {key}: remove it, and measure published weights with `uv run"
                f" eval`, or remove {cause}"
            )
    if config.deployment.is_multi_node:
        yield (
            f"{key} is for a server that shares GPUs with the trainer, and"
            f' {ROOT.deployment.type} = "multi_node" gives each role its own: remove {cause}'
        )


def _gpu_problems(config: RLConfig) -> Iterator[str]:
    """Check how the GPUs of one machine are divided."""
    if config.inference is not None and (
        problem := tensor_parallel_problem(
            config.inference.parallel.tp,
            num_gpus=len(config.inference_gpu_ids),
            key=str(INFERENCE.parallel.tp),
            gpu_ids=str(ROOT.inference_gpu_ids),
        )
    ):
        yield problem
    if problem := replicas_problem(
        config.trainer.model.dp_replicate,
        num_ranks=len(config.trainer_gpu_ids),
        key=str(TRAINER.model.dp_replicate),
        ranks=f"the GPUs of {ROOT.trainer_gpu_ids}",
    ):
        yield problem
    for key, ids in ((ROOT.inference_gpu_ids, config.inference_gpu_ids), (ROOT.trainer_gpu_ids, config.trainer_gpu_ids)):
        if len(set(ids)) != len(ids) or not ids:
            yield f"{key} must name at least one GPU and each once, got {ids}"


def _node_problems(config: RLConfig) -> Iterator[str]:
    """Check what a run of several nodes needs besides the section itself."""
    deployment = config.deployment
    if (config.inference is None) != (deployment.num_infer_nodes == 0):
        yield (
            f"{ROOT.deployment.num_infer_nodes} ({deployment.num_infer_nodes}) must be 0 if the run starts no server"
            f' ({ROOT.inference} = "None", or a replay), and only then'
        )
    if deployment.num_infer_nodes > 1 and config.inference is not None:
        yield from _spanning_problems(config.inference, deployment)
    if config.teacher_inference is not None:
        yield (
            f'{ROOT.deployment.type} = "multi_node" has no place for a teacher\'s server: start it yourself, name it in'
            f" {ORCHESTRATOR.teacher_model.client.base_url} and remove [{ROOT.teacher_inference}] and {ROOT.teacher_gpu_ids}"
        )
    num_ranks = deployment.num_train_nodes * (deployment.gpus_per_node or config.trainer_cpu_ranks)
    if deployment.nodes_per_fsdp_group is None and (
        problem := replicas_problem(
            config.trainer.model.dp_replicate,
            num_ranks=num_ranks,
            key=str(TRAINER.model.dp_replicate),
            ranks="the ranks of all nodes",
        )
    ):
        yield problem
    if deployment.gpus_per_node and deployment.num_infer_nodes == 1 and config.inference is not None:
        num_gpus = deployment.gpus_per_node // deployment.servers_per_node
        if problem := tensor_parallel_problem(
            config.inference.parallel.tp,
            num_gpus=num_gpus,
            key=str(INFERENCE.parallel.tp),
            gpu_ids=f"{ROOT.deployment.gpus_per_node} / servers_per_node",
        ):
            yield problem


def _spanning_problems(inference: InferenceConfig, deployment: DeploymentConfig) -> Iterator[str]:
    """Check that the ranks of a server over several nodes are one replica with as many of them on each node."""
    pipeline = inference.vllm_args.get("pipeline_parallel_size", 1)
    num_nodes, num_ranks = deployment.num_infer_nodes, inference.parallel.tp * (pipeline if isinstance(pipeline, int) else 1)
    key = INFERENCE.parallel.tp if num_ranks == inference.parallel.tp else f"{INFERENCE.parallel.tp} * pipeline_parallel_size"
    advice = (
        f"change it, or start a server on each node with {ROOT.deployment.num_infer_nodes} = 1 and a larger"
        f" {ROOT.deployment.num_infer_replicas}"
    )
    if inference.parallel.dp > 1:
        yield (
            f"{INFERENCE.parallel.dp} ({inference.parallel.dp}) must be 1 for a server over several nodes"
            f" ({ROOT.deployment.num_infer_nodes} = {num_nodes}); {advice}"
        )
    if (num_gpus := num_nodes * deployment.gpus_per_node) and num_ranks != num_gpus:
        yield (
            f"{key} ({num_ranks}) must be the GPUs of the server, {ROOT.deployment.num_infer_nodes} *"
            f" {ROOT.deployment.gpus_per_node} = {num_nodes} * {deployment.gpus_per_node} = {num_gpus}; {advice}"
        )
    elif num_ranks % num_nodes:
        yield (
            f"{key} ({num_ranks}) must be divisible by {ROOT.deployment.num_infer_nodes} ({num_nodes}), for each node has as many"
            f" ranks; {advice}"
        )


def _layout_problems(config: RLConfig) -> Iterator[str]:
    """Check that servers can load the model that the trainer trains."""
    model = config.trainer.model
    if model.debug != DebugModelConfig():
        yield (
            f"{TRAINER.model.debug} makes a model that servers do not have: they load all of {ROOT.model.name}; use it with"
            " `uv run trainer` and data.replay, or with `uv run sft`, or save such a model and give its directory as"
            f" {ROOT.model.name}"
        )


def _port_problems(config: RLConfig) -> Iterator[str]:
    """Check that no other port of the run equals that of the trainer's metrics server."""
    if config.trainer.metrics_server is None:
        return
    port = config.trainer.metrics_server.port
    others = [(TRAINER.rollout_transport.port, config.trainer.rollout_transport.port)]
    if config.inference is not None:
        others.append((INFERENCE.server.port, config.inference.server.port))
    if config.teacher_inference is not None:
        others.append((TEACHER_INFERENCE.server.port, config.teacher_inference.server.port))
    for key, taken in others:
        if port == taken:
            yield f"{TRAINER.metrics_server.port} ({port}) is {key} too; set another, or 0 for any that is free"


def _teacher_problems(config: RLConfig) -> Iterator[str]:
    if config.trainer.loss.needs_teacher and config.orchestrator.replay is not None:
        yield (
            f"{TRAINER.loss.teacher_tau} is above 0 and needs a teacher's server, and {ORCHESTRATOR.replay}"
            f" ({config.orchestrator.replay}) starts none; set it to 0"
        )
    elif config.trainer.loss.needs_teacher and config.orchestrator.teacher_model is None:
        yield (
            f"{TRAINER.loss.teacher_tau} is above 0 and there is no teacher: set {ORCHESTRATOR.teacher_model.model.name}, and"
            f" {ROOT.teacher_gpu_ids} for a server that the run starts, or {ORCHESTRATOR.teacher_model.client.base_url} for one"
            " that runs already"
        )
    if config.teacher_inference is not None:
        yield from inference_problems(config.teacher_inference, TEACHER_INFERENCE)
        if config.teacher_inference.sleep_while_training:
            yield f"{TEACHER_INFERENCE.sleep_while_training} = true: only the policy's server can sleep; remove it"


def _teacher_notices(config: RLConfig) -> Iterator[str]:
    if config.orchestrator.teacher_model is None:
        return
    loss = config.trainer.loss
    if not loss.needs_teacher and loss.type != "custom":
        yield (
            f"{ORCHESTRATOR.teacher_model} scores every sample, but the loss does not use its log-probabilities:"
            f' {TRAINER.loss.teacher_tau} is 0, or the loss is not of type "default"'
        )
    if loss.needs_teacher and config.orchestrator.buffer.online_difficulty_filtering:
        yield (
            f"{ORCHESTRATOR.buffer.online_difficulty_filtering} leaves out groups of equal rewards, although the teacher's"
            " log-probabilities give them a gradient"
        )
    if config.orchestrator.sampling.temperature not in (None, 1.0):
        yield (
            f"{ORCHESTRATOR.sampling.temperature} is {config.orchestrator.sampling.temperature}, and the teacher's"
            " log-probabilities are of temperature 1: the loss pulls the policy at the first temperature towards the teacher at"
            " the second"
        )
    taught, seq_len = config.teacher_inference, config.orchestrator.seq_len
    if taught is not None and taught.model.max_model_len is not None and taught.model.max_model_len <= seq_len:
        yield (
            f"{TEACHER_INFERENCE.model.max_model_len} ({taught.model.max_model_len}) <= {ORCHESTRATOR.seq_len} ({seq_len}): the"
            " teacher's server refuses samples of that length or more, and their groups fail"
        )


def _length_problems(config: RLConfig, inference: InferenceConfig) -> Iterator[str]:
    """Check that a prompt fits into the server's context next to a completion of `max_tokens`."""
    max_tokens, max_model_len = config.orchestrator.sampling.max_tokens, inference.model.max_model_len
    if max_tokens is not None and max_model_len is not None and max_tokens >= max_model_len:
        yield (
            f"{ORCHESTRATOR.sampling.max_tokens} ({max_tokens}) must be < {INFERENCE.model.max_model_len} ({max_model_len}):"
            " prompt and completion share the context, so that the server would refuse every request; lower the first or raise"
            " the second"
        )


def _adapter_problems(lora: LoRAConfig | None, inference: InferenceConfig) -> Iterator[str]:
    """Check that the servers can serve the LoRA adapters that the trainer publishes."""
    if lora is None:
        return
    if not inference.enable_lora:
        yield f"{INFERENCE.enable_lora} must be true with {TRAINER.model.lora}: the trainer publishes adapters; remove the key"
    if inference.max_lora_rank < lora.rank:
        yield (
            f"{INFERENCE.max_lora_rank} ({inference.max_lora_rank}) must be >= {TRAINER.model.lora.rank} ({lora.rank});"
            f" remove {INFERENCE.max_lora_rank}"
        )
    if lora.modules_to_save:
        yield (
            f"{TRAINER.model.lora.modules_to_save} ({literal(lora.modules_to_save)}) cannot be served: servers load"
            f" low-rank adapters alone; remove it, or train all weights (without {TRAINER.model.lora})"
        )


def run_notices(config: RLConfig) -> Iterator[str]:
    """Yield the notices of a run: those of each role, and those between roles."""
    if config.trainer.bench is not None:
        return
    if config.max_steps is None and config.orchestrator.replay is None:
        yield f"{ROOT.max_steps} is not set: the run goes on until it is stopped"
    yield from sampling_notices(config.orchestrator, ORCHESTRATOR)
    if config.inference is not None:
        yield from engine_notices(config.inference, INFERENCE)
    yield from _teacher_notices(config)
    tokenizer = config.trainer.tokenizer.name
    if tokenizer is not None and tokenizer != config.trainer.model.name:
        yield (
            f"{TRAINER.tokenizer.name} ({tokenizer}) is saved with the weights; generation starts with the tokenizer of"
            f" {ROOT.model.name} ({config.trainer.model.name})"
        )
    if config.inference is None:
        if config.trainer.tokenizer.chat_template is not None:
            yield (
                f"{TRAINER.tokenizer.chat_template} is saved with the weights; give it to the servers too, as"
                f" {INFERENCE.model.chat_template} of each"
            )
        return
    yield from _length_notices(config.orchestrator.seq_len, config.inference.model.max_model_len)


def _length_notices(seq_len: int, max_model_len: int | None) -> Iterator[str]:
    """Say what happens to samples when the server's context and the trained length differ."""
    if max_model_len is None:
        yield (
            f"{INFERENCE.model.max_model_len} is the model's own limit: of longer samples the first {ORCHESTRATOR.seq_len}"
            f" ({seq_len}) tokens are trained on"
        )
    elif max_model_len > seq_len:
        yield (
            f"{INFERENCE.model.max_model_len} ({max_model_len}) > {ORCHESTRATOR.seq_len} ({seq_len}): the server may generate"
            f" samples of up to {max_model_len} tokens, of which the first {seq_len} are trained on"
        )
    elif max_model_len < seq_len:
        yield (
            f"{INFERENCE.model.max_model_len} ({max_model_len}) < {ORCHESTRATOR.seq_len} ({seq_len}): the server ends a"
            f" completion when it and its prompt reach {max_model_len} tokens"
        )
