"""Checks the configuration of a whole run: values on which its roles must agree, and notices that concern several roles.

A problem stops the command, a notice does not. Each is one message to the user.
"""

from collections.abc import Iterator

from trivet.config.checks.numbers import replicas_problem, tensor_parallel_problem
from trivet.config.checks.roles import inference_problems, orchestrator_problems, training_problems
from trivet.config.checks.sampling import sampling_notices
from trivet.config.loading.dump import literal
from trivet.config.sections.inference import InferenceConfig
from trivet.config.sections.lora import LoRAConfig
from trivet.config.sections.model import DebugModelConfig
from trivet.config.sections.rl import RLConfig


def run_problems(config: RLConfig) -> Iterator[str]:
    """Yield the problems of a run: those of each role, and those between roles."""
    yield from training_problems(config.trainer, "trainer.")
    if config.trainer.bench is not None:
        return  # the trainer alone is started
    if config.trainer.data.fake is not None:
        yield "trainer.data.fake trains without orchestrator and servers: give it to `uv run trainer` as data.fake"
    if config.trainer.data.replay is not None:
        yield (
            f"trainer.data.replay ({config.trainer.data.replay}) trains without orchestrator and servers: give it to"
            " `uv run trainer` as data.replay"
        )
    yield from _layout_problems(config)
    yield from orchestrator_problems(config.orchestrator, "orchestrator.")
    if config.inference is not None:
        yield from inference_problems(config.inference, "inference.")
        yield from _length_problems(config, config.inference)
        yield from _adapter_problems(config.trainer.model.lora, config.inference)
        tp, num_gpus = config.inference.parallel.tp, len(config.inference_gpu_ids)
        if problem := tensor_parallel_problem(tp, num_gpus=num_gpus, section="inference", gpu_ids="inference_gpu_ids"):
            yield problem
    yield from _port_problems(config)
    yield from _teacher_problems(config)
    for key, ids in (("inference_gpu_ids", config.inference_gpu_ids), ("trainer_gpu_ids", config.trainer_gpu_ids)):
        if len(set(ids)) != len(ids) or not ids:
            yield f"{key} must name at least one GPU and each once, got {ids}"
    trainer_len, orchestrator_len = config.trainer.model.seq_len, config.orchestrator.seq_len
    if trainer_len < orchestrator_len:
        yield (
            f"trainer.model.seq_len ({trainer_len}) must be >= orchestrator.seq_len ({orchestrator_len}), which packs rows of"
            f" that length; raise trainer.model.seq_len, or set seq_len for both"
        )


def _layout_problems(config: RLConfig) -> Iterator[str]:
    """Check how the trainer's model is distributed over its ranks, and that servers can load the same model."""
    model = config.trainer.model
    if problem := replicas_problem(
        model.dp_replicate,
        num_ranks=len(config.trainer_gpu_ids),
        key="trainer.model.dp_replicate",
        ranks="the GPUs of trainer_gpu_ids",
    ):
        yield problem
    if model.debug != DebugModelConfig():
        yield (
            "trainer.model.debug makes a model that servers do not have: they load all of model.name; use it with"
            " `uv run trainer` and data.replay, or with `uv run sft`, or save such a model and give its directory as model.name"
        )


def _port_problems(config: RLConfig) -> Iterator[str]:
    """Check that no other port of the run equals that of the trainer's metrics server."""
    if config.trainer.metrics_server is None:
        return
    port = config.trainer.metrics_server.port
    others = {"trainer.rollout_transport.port": config.trainer.rollout_transport.port}
    if config.inference is not None:
        others["inference.server.port"] = config.inference.server.port
    if config.teacher_inference is not None:
        others["teacher_inference.server.port"] = config.teacher_inference.server.port
    for key, taken in others.items():
        if port == taken:
            yield f"trainer.metrics_server.port ({port}) is {key} too; set another, or 0 for any that is free"


def _teacher_problems(config: RLConfig) -> Iterator[str]:
    if config.trainer.loss.needs_teacher and config.orchestrator.teacher_model is None:
        yield (
            "trainer.loss.teacher_tau is above 0 and there is no teacher: set orchestrator.teacher_model.model.name, and"
            " teacher_gpu_ids for a server that the run starts, or orchestrator.teacher_model.client.base_url for one that runs"
        )
    if config.teacher_inference is not None:
        yield from inference_problems(config.teacher_inference, "teacher_inference.")


def _teacher_notices(config: RLConfig) -> Iterator[str]:
    if config.orchestrator.teacher_model is None:
        return
    loss = config.trainer.loss
    if not loss.needs_teacher and loss.type != "custom":
        yield (
            "orchestrator.teacher_model is asked about every sample and nothing is learnt from it: trainer.loss.teacher_tau is"
            ' 0, or the loss is not of type "default"'
        )
    if loss.needs_teacher and config.orchestrator.buffer.online_difficulty_filtering:
        yield (
            "orchestrator.buffer.online_difficulty_filtering leaves out groups of equal rewards, which the teacher could still"
            " teach"
        )
    if config.orchestrator.sampling.temperature not in (None, 1.0):
        yield (
            f"orchestrator.sampling.temperature is {config.orchestrator.sampling.temperature}, and the teacher's"
            " log-probabilities are of temperature 1: the policy at that temperature is pulled towards them"
        )
    taught, seq_len = config.teacher_inference, config.orchestrator.seq_len
    if taught is not None and taught.model.max_model_len is not None and taught.model.max_model_len <= seq_len:
        yield (
            f"teacher_inference.model.max_model_len ({taught.model.max_model_len}) <= orchestrator.seq_len ({seq_len}): the"
            " teacher refuses samples of that length or more, and their groups fail"
        )


def _length_problems(config: RLConfig, inference: InferenceConfig) -> Iterator[str]:
    """Check that a prompt fits into the server's context next to a completion of `max_tokens`."""
    max_tokens, max_model_len = config.orchestrator.sampling.max_tokens, inference.model.max_model_len
    if max_tokens is not None and max_model_len is not None and max_tokens >= max_model_len:
        yield (
            f"orchestrator.sampling.max_tokens ({max_tokens}) must be < inference.model.max_model_len ({max_model_len}):"
            f" the prompt needs room too, and the server would refuse every request; lower the first or raise the second"
        )


def _adapter_problems(lora: LoRAConfig | None, inference: InferenceConfig) -> Iterator[str]:
    """Check that the servers can serve the LoRA adapters that the trainer publishes."""
    if lora is None:
        return
    if not inference.enable_lora:
        yield "inference.enable_lora must be true with trainer.model.lora: what is published are adapters; remove the key"
    if inference.max_lora_rank < lora.rank:
        yield (
            f"inference.max_lora_rank ({inference.max_lora_rank}) must be >= trainer.model.lora.rank ({lora.rank});"
            f" remove inference.max_lora_rank"
        )
    if lora.modules_to_save:
        yield (
            f"trainer.model.lora.modules_to_save ({literal(lora.modules_to_save)}) cannot be served: servers load low-rank"
            f" adapters alone; remove it, or train all weights (without trainer.model.lora)"
        )


def run_notices(config: RLConfig) -> Iterator[str]:
    """Yield the notices of a run: those of each role, and those between roles."""
    if config.trainer.bench is not None:
        return
    if config.max_steps is None:
        yield "max_steps is not set: the run goes on until it is stopped"
    yield from sampling_notices(config.orchestrator, "orchestrator.")
    yield from _teacher_notices(config)
    tokenizer = config.trainer.tokenizer.name
    if tokenizer is not None and tokenizer != config.trainer.model.name:
        yield (
            f"trainer.tokenizer.name ({tokenizer}) is saved with the weights; generation starts with the tokenizer of"
            f" model.name ({config.trainer.model.name})"
        )
    if config.inference is None:
        if config.trainer.tokenizer.chat_template is not None:
            yield (
                "trainer.tokenizer.chat_template is saved with the weights; give it to the servers too, as"
                " inference.model.chat_template of each"
            )
        return
    yield from _length_notices(config.orchestrator.seq_len, config.inference.model.max_model_len)


def _length_notices(seq_len: int, max_model_len: int | None) -> Iterator[str]:
    """Say what happens to samples when the server's context and the trained length differ."""
    if max_model_len is None:
        yield (
            f"inference.model.max_model_len is the model's own limit: of longer samples the first orchestrator.seq_len ({seq_len}) "
            "tokens are trained on"
        )
    elif max_model_len > seq_len:
        yield (
            f"inference.model.max_model_len ({max_model_len}) > orchestrator.seq_len ({seq_len}): the server may generate"
            f" samples of up to {max_model_len} tokens, of which the first {seq_len} are trained on"
        )
    elif max_model_len < seq_len:
        yield (
            f"inference.model.max_model_len ({max_model_len}) < orchestrator.seq_len ({seq_len}): the server ends a completion"
            f" when it and its prompt reach {max_model_len} tokens"
        )
