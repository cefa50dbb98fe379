"""Checks over several keys of a validated configuration. They run before anything is started.

A check yields the text of each problem, which stops the command, or notice, which does not. It gets the configuration and the
`findings.Key` of its section, whose text is the user's name of the key. What looks at files is in `check_files`.
"""

from collections.abc import Iterator

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
from trivet.config.schema.model import DebugModelConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.trainer import TrainingConfig


def check(config: Section, findings: Findings) -> None:
    """Check everything that concerns more than one key of `config`."""
    problems, notices = iter(()), iter(())
    if isinstance(config, RLConfig):
        problems, notices = _run_problems(config), _run_notices(config)
    elif isinstance(config, OrchestratorConfig):
        problems, notices = orchestrator_problems(config), orchestrator_notices(config)
    elif isinstance(config, TrainingConfig):
        problems = training_problems(config)
    elif isinstance(config, InferenceConfig):
        problems = inference_problems(config)
    elif isinstance(config, EvalConfig):
        problems = offline_problems(config)
    for problem in problems:
        findings.refuse(problem)
    for notice in notices:
        findings.notice(notice)


def _run_problems(config: RLConfig) -> Iterator[str]:
    """Yield the problems of a run: those of each role, and those between roles."""
    yield from training_problems(config.trainer, ROOT.trainer)
    if config.trainer.bench is not None:
        return  # the trainer alone is started
    yield from _alone_problems(config)
    yield from orchestrator_problems(config.orchestrator, ROOT.orchestrator)
    if config.inference is not None:
        yield from inference_problems(config.inference, ROOT.inference)
        yield from _served_problems(config, config.inference)
    yield from _sleep_problems(config)
    yield from _port_problems(config)
    yield from _teacher_problems(config)
    yield from _node_problems(config) if config.deployment.is_multi_node else _gpu_problems(config)
    trainer_len, orchestrator_len = config.trainer.model.seq_len, config.orchestrator.seq_len
    if trainer_len < orchestrator_len:
        yield (
            f"{ROOT.trainer.model.seq_len} ({trainer_len}) must be >= {ROOT.orchestrator.seq_len} ({orchestrator_len}), which packs"
            f" rows of that length; raise {ROOT.trainer.model.seq_len}, or set {ROOT.seq_len} for both"
        )


def _alone_problems(config: RLConfig) -> Iterator[str]:
    """Refuse what the trainer can do only without orchestrator and servers."""
    data = config.trainer.data
    if data.fake is not None:
        yield f"{ROOT.trainer.data.fake} trains without orchestrator and servers: give it to `uv run trainer` as data.fake"
    if data.replay is not None:
        yield (
            f"{ROOT.trainer.data.replay} ({data.replay}) trains without orchestrator and servers: give it to"
            " `uv run trainer` as data.replay"
        )
    if config.trainer.model.debug != DebugModelConfig():
        yield (
            f"{ROOT.trainer.model.debug} makes a model that servers do not have: they load all of {ROOT.model.name}; use it with"
            " `uv run trainer` and data.replay, or with `uv run sft`, or save such a model and give its directory as"
            f" {ROOT.model.name}"
        )


def _port_problems(config: RLConfig) -> Iterator[str]:
    """Check that no other port of the run equals that of the trainer's metrics server."""
    metrics_server = config.trainer.metrics_server
    others = [(ROOT.trainer.rollout_transport.port, config.trainer.rollout_transport.port)]
    for key, server in ((ROOT.inference, config.inference), (ROOT.teacher_inference, config.teacher_inference)):
        others.extend([(key.server.port, server.server.port)] if server is not None else [])
    for key, port in others:
        if metrics_server is not None and metrics_server.port == port:
            yield f"{ROOT.trainer.metrics_server.port} ({port}) is {key} too; set another, or 0 for any that is free"


def _served_problems(config: RLConfig, inference: InferenceConfig) -> Iterator[str]:
    """Check that the servers can answer the requests, and serve what the trainer publishes."""
    max_tokens, max_model_len = config.orchestrator.sampling.max_tokens, inference.model.max_model_len
    lora, lora_key = config.trainer.model.lora, ROOT.trainer.model.lora
    if max_tokens is not None and max_model_len is not None and max_tokens >= max_model_len:
        yield (
            f"{ROOT.orchestrator.sampling.max_tokens} ({max_tokens}) must be < {ROOT.inference.model.max_model_len}"
            f" ({max_model_len}): prompt and completion share the context, so that the server would refuse every request; lower"
            " the first or raise the second"
        )
    if lora is None:
        return
    if not inference.enable_lora:
        yield f"{ROOT.inference.enable_lora} must be true with {lora_key}: the trainer publishes adapters; remove the key"
    if inference.max_lora_rank < lora.rank:
        yield (
            f"{ROOT.inference.max_lora_rank} ({inference.max_lora_rank}) must be >= {lora_key.rank} ({lora.rank});"
            f" remove {ROOT.inference.max_lora_rank}"
        )
    if lora.modules_to_save:
        yield (
            f"{lora_key.modules_to_save} ({literal(lora.modules_to_save)}) cannot be served: servers load"
            f" low-rank adapters alone; remove it, or train all weights (without {lora_key})"
        )


def _sleep_problems(config: RLConfig) -> Iterator[str]:
    """Check that the roles take turns, and that nothing is generated while the server sleeps."""
    sleeps = config.orchestrator.sleep_servers
    if config.inference is not None and sleeps != (sleeps := config.inference.sleep_while_training):
        yield (
            f"{ROOT.orchestrator.sleep_servers} ({literal(not sleeps)}) must be {ROOT.inference.sleep_while_training}"
            f" ({literal(sleeps)}); remove {ROOT.orchestrator.sleep_servers}"
        )
    if not sleeps:
        return
    # Servers that the run does not start are told to sleep by the orchestrator's own key.
    cause = ROOT.inference.sleep_while_training if config.inference is not None else ROOT.orchestrator.sleep_servers
    if not config.trainer.release_gpu_memory:
        remedy = f"remove {ROOT.trainer.release_gpu_memory}" if config.inference is not None else "set it to true"
        yield f"{ROOT.trainer.release_gpu_memory} (false) must be {cause} (true); {remedy}"
    if level := config.orchestrator.max_async_level:
        yield (
            f"{cause} = true needs {ROOT.max_async_level} = 0, got {level}: at a higher level the server generates while the"
            f" trainer learns; set {ROOT.max_async_level} = 0, or remove {cause}"
        )
    for section, key in ((config.orchestrator.eval, ROOT.orchestrator.eval), (config.orchestrator.val, ROOT.orchestrator.val)):
        if section is not None:
            yield (
                f"[{key}] generates while the trainer learns, and {cause} = true: remove it, and measure published weights with"
                f" `uv run eval`, or remove {cause}"
            )
    if config.deployment.is_multi_node:
        yield (
            f"{cause} = true is for a server that shares GPUs with the trainer, and"
            f' {ROOT.deployment.type} = "multi_node" gives each role its own: remove {cause}'
        )


def _teacher_problems(config: RLConfig) -> Iterator[str]:
    teacher = ROOT.orchestrator.teacher_model
    if config.trainer.loss.needs_teacher and config.orchestrator.replay is not None:
        yield (
            f"{ROOT.trainer.loss.teacher_tau} is above 0 and needs a teacher's server, and {ROOT.orchestrator.replay}"
            f" ({config.orchestrator.replay}) starts none; set it to 0"
        )
    elif config.trainer.loss.needs_teacher and config.orchestrator.teacher_model is None:
        yield (
            f"{ROOT.trainer.loss.teacher_tau} is above 0 and there is no teacher: set {teacher.model.name}, and"
            f" {ROOT.teacher_gpu_ids} for a server that the run starts, or {teacher.client.base_url} for one"
            " that runs already"
        )
    if config.teacher_inference is not None:
        yield from inference_problems(config.teacher_inference, ROOT.teacher_inference)
        if config.teacher_inference.sleep_while_training:
            yield f"{ROOT.teacher_inference.sleep_while_training} = true: only the policy's server can sleep; remove it"


def _gpu_problems(config: RLConfig) -> Iterator[str]:
    """Check how the GPUs of one machine are divided."""
    inference = config.inference
    problems = [
        tensor_parallel_problem(
            1 if inference is None else inference.parallel.tp,
            num_gpus=len(config.inference_gpu_ids),
            key=str(ROOT.inference.parallel.tp),
            gpu_ids=str(ROOT.inference_gpu_ids),
        ),
        replicas_problem(
            config.trainer.model.dp_replicate,
            num_ranks=len(config.trainer_gpu_ids),
            key=str(ROOT.trainer.model.dp_replicate),
            ranks=f"the GPUs of {ROOT.trainer_gpu_ids}",
        ),
    ]
    yield from filter(None, problems)
    for key, ids in ((ROOT.inference_gpu_ids, config.inference_gpu_ids), (ROOT.trainer_gpu_ids, config.trainer_gpu_ids)):
        if len(set(ids)) != len(ids) or not ids:
            yield f"{key} must name at least one GPU and each once, got {ids}"


def _node_problems(config: RLConfig) -> Iterator[str]:
    """Check what a run of several nodes needs besides the section itself."""
    deployment, inference = config.deployment, config.inference
    if (inference is None) != (deployment.num_infer_nodes == 0):
        yield (
            f"{ROOT.deployment.num_infer_nodes} ({deployment.num_infer_nodes}) must be 0 if the run starts no server"
            f' ({ROOT.inference} = "None", or a replay), and only then'
        )
    if deployment.num_infer_nodes > 1 and inference is not None:
        yield from _spanning_problems(inference, deployment)
    if config.teacher_inference is not None:
        yield (
            f'{ROOT.deployment.type} = "multi_node" has no place for a teacher\'s server: start it yourself, name it in'
            f" {ROOT.orchestrator.teacher_model.client.base_url} and remove [{ROOT.teacher_inference}] and {ROOT.teacher_gpu_ids}"
        )
    num_ranks = deployment.num_train_nodes * (deployment.gpus_per_node or config.trainer_cpu_ranks)
    if deployment.nodes_per_fsdp_group is None and (
        problem := replicas_problem(
            config.trainer.model.dp_replicate,
            num_ranks=num_ranks,
            key=str(ROOT.trainer.model.dp_replicate),
            ranks="the ranks of all nodes",
        )
    ):
        yield problem
    if deployment.gpus_per_node and deployment.num_infer_nodes == 1 and inference is not None:
        problem = tensor_parallel_problem(
            inference.parallel.tp,
            num_gpus=deployment.gpus_per_node // deployment.servers_per_node,
            key=str(ROOT.inference.parallel.tp),
            gpu_ids=f"{ROOT.deployment.gpus_per_node} / servers_per_node",
        )
        yield from filter(None, [problem])


def _spanning_problems(inference: InferenceConfig, deployment: DeploymentConfig) -> Iterator[str]:
    """Check that the ranks of a server over several nodes are one replica with as many of them on each node."""
    pipeline = inference.vllm_args.get("pipeline_parallel_size", 1)
    num_nodes, num_ranks = deployment.num_infer_nodes, inference.parallel.tp * (pipeline if isinstance(pipeline, int) else 1)
    nodes, tp = ROOT.deployment.num_infer_nodes, ROOT.inference.parallel.tp
    key = tp if num_ranks == inference.parallel.tp else f"{tp} * pipeline_parallel_size"
    advice = f"change it, or start a server on each node with {nodes} = 1 and a larger {ROOT.deployment.num_infer_replicas}"
    if inference.parallel.dp > 1:
        yield (
            f"{ROOT.inference.parallel.dp} ({inference.parallel.dp}) must be 1 for a server over several nodes"
            f" ({nodes} = {num_nodes}); {advice}"
        )
    if (num_gpus := num_nodes * deployment.gpus_per_node) and num_ranks != num_gpus:
        yield (
            f"{key} ({num_ranks}) must be the GPUs of the server, {nodes} * {ROOT.deployment.gpus_per_node} ="
            f" {num_nodes} * {deployment.gpus_per_node} = {num_gpus}; {advice}"
        )
    elif num_ranks % num_nodes:
        yield (f"{key} ({num_ranks}) must be divisible by {nodes} ({num_nodes}), for each node has as many ranks; {advice}")


def _run_notices(config: RLConfig) -> Iterator[str]:
    """Yield the notices of a run: those of each role, and those between roles."""
    if config.trainer.bench is not None:
        return
    if config.max_steps is None and config.orchestrator.replay is None:
        yield f"{ROOT.max_steps} is not set: the run goes on until it is stopped"
    yield from sampling_notices(config.orchestrator, ROOT.orchestrator)
    if config.inference is not None:
        yield from engine_notices(config.inference, ROOT.inference)
    if config.orchestrator.teacher_model is not None:
        yield from _teacher_notices(config)
    tokenizer = config.trainer.tokenizer.name
    if tokenizer is not None and tokenizer != config.trainer.model.name:
        yield (
            f"{ROOT.trainer.tokenizer.name} ({tokenizer}) is saved with the weights; generation starts with the tokenizer of"
            f" {ROOT.model.name} ({config.trainer.model.name})"
        )
    if config.inference is not None:
        yield from _length_notices(config.orchestrator.seq_len, config.inference.model.max_model_len)
    elif config.trainer.tokenizer.chat_template is not None:
        yield (
            f"{ROOT.trainer.tokenizer.chat_template} is saved with the weights; give it to the servers too, as"
            f" {ROOT.inference.model.chat_template} of each"
        )


def _teacher_notices(config: RLConfig) -> Iterator[str]:
    loss, orchestrator, server = config.trainer.loss, config.orchestrator, config.teacher_inference
    temperature = orchestrator.sampling.temperature
    if not loss.needs_teacher and loss.type != "custom":
        yield (
            f"{ROOT.orchestrator.teacher_model} scores every sample, but the loss does not use its log-probabilities:"
            f' {ROOT.trainer.loss.teacher_tau} is 0, or the loss is not of type "default"'
        )
    if loss.needs_teacher and orchestrator.buffer.online_difficulty_filtering:
        yield (
            f"{ROOT.orchestrator.buffer.online_difficulty_filtering} leaves out groups of equal rewards, although the teacher's"
            " log-probabilities give them a gradient"
        )
    if temperature not in (None, 1.0):
        yield (
            f"{ROOT.orchestrator.sampling.temperature} is {temperature}, and the teacher's log-probabilities are of temperature 1:"
            " the loss pulls the policy at the first temperature towards the teacher at the second"
        )
    if (
        server is not None
        and (max_model_len := server.model.max_model_len) is not None
        and max_model_len <= orchestrator.seq_len
    ):
        yield (
            f"{ROOT.teacher_inference.model.max_model_len} ({max_model_len}) <= {ROOT.orchestrator.seq_len}"
            f" ({orchestrator.seq_len}): the teacher's server refuses samples of that length or more, and their groups fail"
        )


def _length_notices(seq_len: int, max_model_len: int | None) -> Iterator[str]:
    """Say what happens to samples when the server's context and the trained length differ."""
    served, trained = ROOT.inference.model.max_model_len, ROOT.orchestrator.seq_len
    if max_model_len is None:
        yield f"{served} is the model's own limit: of longer samples the first {trained} ({seq_len}) tokens are trained on"
    elif max_model_len > seq_len:
        yield (
            f"{served} ({max_model_len}) > {trained} ({seq_len}): the server may generate"
            f" samples of up to {max_model_len} tokens, of which the first {seq_len} are trained on"
        )
    elif max_model_len < seq_len:
        yield (
            f"{served} ({max_model_len}) < {trained} ({seq_len}): the server ends a"
            f" completion when it and its prompt reach {max_model_len} tokens"
        )
