"""Checks over several keys of a validated configuration. They run before anything is started.

A check yields texts: problems stop the command, notices do not. Its arguments are a section and, as `at`, the `findings.Key` of
that section, whose text is the user's name of the key. Checks that read files are in `check_files`, those of one role in
`check_roles`.
"""

from collections.abc import Iterator

from trivet.config.check_roles import (
    engine_notices,
    inference_problems,
    offline_problems,
    orchestrator_notices,
    orchestrator_problems,
    ranks_problem,
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
from trivet.config.schema.shared import IN_MEMORY
from trivet.config.schema.trainer import TrainingConfig

_TRAINER, _ORCHESTRATOR, _SERVER, _TEACHER = ROOT.trainer, ROOT.orchestrator, ROOT.inference, ROOT.orchestrator.teacher_model


def check(config: Section, findings: Findings) -> None:
    """Run all checks over several keys of `config`, and add what they yield to `findings`."""
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
    trainer, orchestrator, inference = config.trainer, config.orchestrator, config.inference
    yield from training_problems(trainer, _TRAINER)
    if trainer.bench is not None:
        return  # the trainer alone is started
    for key, name, value in (
        (_TRAINER.data.fake, "fake", trainer.data.fake),
        (f"{_TRAINER.data.replay} ({trainer.data.replay})", "replay", trainer.data.replay),
    ):
        if value is not None:
            yield f"{key} trains without orchestrator and servers: give it to `uv run trainer` as data.{name}"
    if trainer.model.debug != DebugModelConfig():
        yield (
            f"{_TRAINER.model.debug} makes a model that servers do not have: they load all of {ROOT.model.name}; use it with"
            f" `uv run trainer` and data.replay, or save such a model and give its directory as {ROOT.model.name}"
        )
    yield from orchestrator_problems(orchestrator, _ORCHESTRATOR)
    if inference is not None:
        yield from inference_problems(inference, _SERVER)
        yield from _served_problems(config, inference)
    yield from _transfer_problems(config)
    yield from _sleep_problems(config)
    ports = [(_TRAINER.rollout_transport.port, trainer.rollout_transport.port)]
    for at, server in ((_SERVER, inference), (ROOT.teacher_inference, config.teacher_inference)):
        ports.extend([(at.server.port, server.server.port)] if server is not None else [])
    for key, port in ports:
        if trainer.metrics_server is not None and trainer.metrics_server.port == port:
            yield f"{_TRAINER.metrics_server.port} ({port}) is {key} too; set another, or 0 for any that is free"
    yield from _teacher_problems(config)
    yield from _node_problems(config) if config.deployment.is_multi_node else _gpu_problems(config)
    if trainer.model.seq_len < orchestrator.seq_len:
        yield (
            f"{_TRAINER.model.seq_len} ({trainer.model.seq_len}) must be >= {_ORCHESTRATOR.seq_len} ({orchestrator.seq_len}),"
            f" which packs rows of that length; raise {_TRAINER.model.seq_len}, or set {ROOT.seq_len} for both"
        )


def _served_problems(config: RLConfig, inference: InferenceConfig) -> Iterator[str]:
    """Check that the servers can answer the requests, and serve what the trainer publishes."""
    max_tokens, max_model_len = config.orchestrator.sampling.max_tokens, inference.model.max_model_len
    lora, lora_key = config.trainer.model.lora, _TRAINER.model.lora
    if max_tokens is not None and max_model_len is not None and max_tokens >= max_model_len:
        yield (
            f"{_ORCHESTRATOR.sampling.max_tokens} ({max_tokens}) must be < {_SERVER.model.max_model_len} ({max_model_len}),"
            " which prompt and completion share; lower the first or raise the second"
        )
    if config.trainer.router_replay and not inference.return_routed_experts:
        key = _SERVER.return_routed_experts
        yield f"{key} must be true with {_TRAINER.router_replay}, which replays the servers' experts; remove {key}"
    if lora is None:
        return
    if not inference.enable_lora:
        yield f"{_SERVER.enable_lora} must be true with {lora_key}: the trainer publishes adapters; remove the key"
    if inference.max_lora_rank < lora.rank:
        key = _SERVER.max_lora_rank
        yield f"{key} ({inference.max_lora_rank}) must be >= {lora_key.rank} ({lora.rank}); remove {key}"
    if lora.modules_to_save:
        yield (
            f"{lora_key.modules_to_save} ({literal(lora.modules_to_save)}) cannot be served: servers load"
            f" low-rank adapters alone; remove it, or train all weights (without {lora_key})"
        )


def _transfer_problems(config: RLConfig) -> Iterator[str]:
    """Check that what is sent from the trainer's memory can arrive in that of the servers."""
    transport, inference, key = config.trainer.weights.transport, config.inference, ROOT.weights.transport
    if inference is not None and inference.weights_transport != transport:
        own = _SERVER.weights_transport
        yield f"{own} ({inference.weights_transport}) must be {key} ({transport}); remove {own}"
    if transport not in IN_MEMORY:
        return
    files = f'set {key} = "files"'
    if config.trainer.model.lora is not None:
        yield f"{key} ({transport}) sends whole models, and {_TRAINER.model.lora} publishes adapters, which are small; {files}"
    if config.orchestrator.sleep_servers:
        yield f"{key} ({transport}) cannot reach a server that sleeps ({_ORCHESTRATOR.sleep_servers} = true); {files}"
    if transport == "nccl" and config.deployment.is_multi_node:
        yield f'{key} (nccl) works on one machine, and {ROOT.deployment.type} is "multi_node"; {files}, or "gloo"'
    elif transport == "nccl" and inference is not None and set(config.inference_gpu_ids) & set(config.trainer_gpu_ids):
        yield f'{key} (nccl) connects no two processes on one GPU, and trainer and server share one; {files}, or "gloo"'


def _sleep_problems(config: RLConfig) -> Iterator[str]:
    """Check that nothing is generated while the server sleeps, and that trainer and server agree on sleeping."""
    orchestrator_key = _ORCHESTRATOR.sleep_servers
    if config.inference is None:  # only the orchestrator's key concerns servers that the run does not start
        sleeps, cause = config.orchestrator.sleep_servers, orchestrator_key
    else:
        sleeps, cause = config.inference.sleep_while_training, _SERVER.sleep_while_training
        if config.orchestrator.sleep_servers != sleeps:
            yield f"{orchestrator_key} ({literal(not sleeps)}) must be {cause} ({literal(sleeps)}); remove {orchestrator_key}"
    if not sleeps:
        return
    if not config.trainer.release_gpu_memory:
        key = _TRAINER.release_gpu_memory
        yield f"{key} (false) must be {cause} (true); {f'remove {key}' if config.inference is not None else 'set it to true'}"
    if level := config.orchestrator.max_async_level:
        yield (
            f"{cause} = true needs {ROOT.max_async_level} = 0, got {level}: at a higher level the server generates while the"
            f" trainer learns; set {ROOT.max_async_level} = 0, or remove {cause}"
        )
    for section, key in ((config.orchestrator.eval, _ORCHESTRATOR.eval), (config.orchestrator.val, _ORCHESTRATOR.val)):
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
    """Check that a loss that needs a teacher has one, and that the teacher's server does not sleep."""
    tau, replay = _TRAINER.loss.teacher_tau, config.orchestrator.replay
    if config.trainer.loss.needs_teacher and replay is not None:
        yield f"{tau} is above 0 and needs a teacher's server, and {_ORCHESTRATOR.replay} ({replay}) starts none; set it to 0"
    elif config.trainer.loss.needs_teacher and config.orchestrator.teacher_model is None:
        yield (
            f"{tau} is above 0 and there is no teacher: set {_TEACHER.model.name}, and {ROOT.teacher_gpu_ids} for a server that"
            f" the run starts, or {_TEACHER.client.base_url} for one that runs already"
        )
    if config.teacher_inference is not None:
        yield from inference_problems(config.teacher_inference, ROOT.teacher_inference)
        if config.teacher_inference.sleep_while_training:
            yield f"{ROOT.teacher_inference.sleep_while_training} = true: only the policy's server can sleep; remove it"


def _gpu_problems(config: RLConfig) -> Iterator[str]:
    """Check how the GPUs of one machine are divided."""
    served, trained = ROOT.inference_gpu_ids, ROOT.trainer_gpu_ids
    tp = 1 if config.inference is None else config.inference.parallel.tp
    num_ranks, ranks = len(config.trainer_gpu_ids), f"the GPUs of {trained}"
    if config.trainer_cpu_ranks > 1:  # the run is for a machine without a GPU
        num_ranks, ranks = config.trainer_cpu_ranks, str(ROOT.trainer_cpu_ranks)
    problems = (
        tensor_parallel_problem(tp, num_gpus=len(config.inference_gpu_ids), key=_SERVER.parallel.tp, gpu_ids=served),
        *(ranks_problem(parts, num_ranks=num_ranks, ranks=ranks) for parts in _parts_of_ranks(config)),
    )
    yield from filter(None, problems)
    for key, ids in ((served, config.inference_gpu_ids), (trained, config.trainer_gpu_ids)):
        if len(set(ids)) != len(ids) or not ids:
            yield f"{key} must name at least one GPU and each once, got {ids}"


def _parts_of_ranks(config: RLConfig) -> tuple[dict[object, int], dict[object, int]]:
    """Return the keys that divide the trainer's ranks together, and the one that divides them in another way."""
    key, model = _TRAINER.model, config.trainer.model
    return {key.dp_replicate: model.dp_replicate, key.cp: model.cp}, {key.ep: model.ep}


def _node_problems(config: RLConfig) -> Iterator[str]:
    """Check that the rest of the configuration fits a run over several nodes, `deployment.type = "multi_node"`."""
    deployment, inference, at = config.deployment, config.inference, ROOT.deployment
    if (inference is None) != (deployment.num_infer_nodes == 0):
        yield (
            f"{at.num_infer_nodes} ({deployment.num_infer_nodes}) must be 0 if the run starts no server"
            f' ({_SERVER} = "None", or a replay), and only then'
        )
    if deployment.num_infer_nodes > 1 and inference is not None:
        yield from _spanning_problems(inference, deployment)
    if deployment.orchestrator_on_inference and config.trainer.weights.transport == "http":
        key, transport = at.orchestrator_on_inference, f'{ROOT.weights.transport} = "http"'
        yield f"{transport} is for servers without an {ROOT.output_dir}, which the orchestrator needs; remove {key}"
    if config.teacher_inference is not None:
        yield (
            f'{at.type} = "multi_node" has no place for a teacher\'s server: start it yourself, name it in'
            f" {_TEACHER.client.base_url} and remove [{ROOT.teacher_inference}] and {ROOT.teacher_gpu_ids}"
        )
    problems: list[str | None] = []
    if deployment.nodes_per_fsdp_group is None:
        num_ranks = deployment.num_train_nodes * (deployment.gpus_per_node or config.trainer_cpu_ranks)
        problems += [ranks_problem(p, num_ranks=num_ranks, ranks="the ranks of all nodes") for p in _parts_of_ranks(config)]
    if deployment.gpus_per_node and deployment.num_infer_nodes == 1 and inference is not None:
        tp, key = inference.parallel.tp, _SERVER.parallel.tp
        num_gpus, gpu_ids = deployment.gpus_per_node // deployment.servers_per_node, f"{at.gpus_per_node} / servers_per_node"
        problems.append(tensor_parallel_problem(tp, num_gpus=num_gpus, key=key, gpu_ids=gpu_ids))
    yield from filter(None, problems)


def _spanning_problems(inference: InferenceConfig, deployment: DeploymentConfig) -> Iterator[str]:
    """Check that a server over several nodes is one replica, with an equal number of ranks on each node."""
    pipeline, dp = inference.vllm_args.get("pipeline_parallel_size", 1), inference.parallel.dp
    num_nodes, num_ranks = deployment.num_infer_nodes, inference.parallel.tp * (pipeline if isinstance(pipeline, int) else 1)
    nodes, tp = ROOT.deployment.num_infer_nodes, _SERVER.parallel.tp
    key = tp if num_ranks == inference.parallel.tp else f"{tp} * pipeline_parallel_size"
    advice = f"change it, or start a server on each node with {nodes} = 1 and a larger {ROOT.deployment.num_infer_replicas}"
    if dp > 1:
        yield f"{_SERVER.parallel.dp} ({dp}) must be 1 for a server over several nodes ({nodes} = {num_nodes}); {advice}"
    if (num_gpus := num_nodes * deployment.gpus_per_node) and num_ranks != num_gpus:
        yield (
            f"{key} ({num_ranks}) must be the GPUs of the server, {nodes} * {ROOT.deployment.gpus_per_node} ="
            f" {num_nodes} * {deployment.gpus_per_node} = {num_gpus}; {advice}"
        )
    elif num_ranks % num_nodes:
        yield f"{key} ({num_ranks}) must be divisible by {nodes} ({num_nodes}), for each node has as many ranks; {advice}"


def _run_notices(config: RLConfig) -> Iterator[str]:
    """Yield the notices of a run: those of each role, and those between roles."""
    trainer, orchestrator, inference = config.trainer, config.orchestrator, config.inference
    if trainer.bench is not None:
        return
    if config.max_steps is None and orchestrator.replay is None:
        yield f"{ROOT.max_steps} is not set: the run goes on until it is stopped"
    yield from sampling_notices(orchestrator, _ORCHESTRATOR)
    if inference is not None:
        yield from engine_notices(inference, _SERVER)
    if orchestrator.teacher_model is not None:
        yield from _teacher_notices(config)
    if trainer.tokenizer.name not in (None, trainer.model.name):
        yield (
            f"{_TRAINER.tokenizer.name} ({trainer.tokenizer.name}) is saved with the weights; generation starts with the"
            f" tokenizer of {ROOT.model.name} ({trainer.model.name})"
        )
    template, served = _TRAINER.tokenizer.chat_template, _SERVER.model.max_model_len
    seq_len, trained = orchestrator.seq_len, _ORCHESTRATOR.seq_len
    max_model_len = None if inference is None else inference.model.max_model_len
    if inference is None and trainer.tokenizer.chat_template is not None:
        yield f"{template} is saved with the weights; give it to the servers too, as {_SERVER.model.chat_template} of each"
    elif inference is not None and max_model_len is None:
        yield f"{served} is the model's own limit: of longer samples the first {trained} ({seq_len}) tokens are trained on"
    elif max_model_len is not None and max_model_len > seq_len:
        yield (
            f"{served} ({max_model_len}) > {trained} ({seq_len}): the server may generate"
            f" samples of up to {max_model_len} tokens, of which the first {seq_len} are trained on"
        )
    elif max_model_len is not None and max_model_len < seq_len:
        yield (
            f"{served} ({max_model_len}) < {trained} ({seq_len}): the server ends a"
            f" completion when it and its prompt reach {max_model_len} tokens"
        )


def _teacher_notices(config: RLConfig) -> Iterator[str]:
    """Yield the notices about a teacher whose scores have no effect, or not the effect that the user may expect."""
    loss, orchestrator, server = config.trainer.loss, config.orchestrator, config.teacher_inference
    temperature, max_model_len = orchestrator.sampling.temperature, None if server is None else server.model.max_model_len
    if not loss.needs_teacher and loss.type != "custom":
        yield (
            f"{_TEACHER} scores every sample, but the loss does not use its log-probabilities:"
            f' {_TRAINER.loss.teacher_tau} is 0, or the loss is not of type "default"'
        )
    if loss.needs_teacher and orchestrator.buffer.online_difficulty_filtering:
        yield (
            f"{_ORCHESTRATOR.buffer.online_difficulty_filtering} leaves out groups of equal rewards, although the teacher's"
            " log-probabilities give them a gradient"
        )
    if temperature not in (None, 1.0):
        yield (
            f"{_ORCHESTRATOR.sampling.temperature} is {temperature}, and the teacher's log-probabilities are of temperature 1:"
            " the loss pulls the policy at the first temperature towards the teacher at the second"
        )
    if max_model_len is not None and max_model_len <= orchestrator.seq_len:
        yield (
            f"{ROOT.teacher_inference.model.max_model_len} ({max_model_len}) <= {_ORCHESTRATOR.seq_len}"
            f" ({orchestrator.seq_len}): the teacher's server refuses samples of that length or more, and their groups fail"
        )
