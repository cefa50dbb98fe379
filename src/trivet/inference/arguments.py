"""Translates InferenceConfig into what vLLM is started with: engine and server arguments, environment variables.

All functions are pure but `position_overrides`, which reads the model's configuration.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.shared import IN_MEMORY
from trivet.errors import ConfigError
from trivet.key_names import key_name
from trivet.process.sockets import ServerShard

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of `max_lora_rank` that vLLM accepts."""

_CPU_BLOCK_SIZE = 32
"""Tokens of a block of the KV cache. Requests share whole blocks of a prompt, and vLLM's own 128 on CPUs is longer than many
prompts. Its attention for CPUs takes multiples of 32. Measured with 64 requests, 8 different prompts of 34 tokens and 64 new tokens
each: 151 to 177 tokens/s with 128, 217 to 226 with 32 (SmolLM2, float32, AVX2, two cores)."""

WORKER_EXTENSION = "trivet.inference.worker_extension.PolicyWorkerExtension"
TRANSFER_ENGINE = "trivet"
"""The name under which vLLM knows the engine for weight transfer of `inference.transfer_engine`."""

JSON_LOG_CONFIG = str(Path(__file__).with_name("json_logging.json"))
"""The logging configuration of vLLM and uvicorn for `log.json_logging`: both have handlers of their own."""


def vllm_arguments(
    config: InferenceConfig, *, is_cpu: bool, run_secret: str, shard: ServerShard | None = None
) -> dict[str, Any]:
    """Return the arguments of vLLM's engine and API server by name; an absent one keeps vLLM's default.

    Args:
        run_secret: accepted in place of `server.api_key`.
        shard: the share of this node in a server that spans several nodes.

    Raises:
        ConfigError: `sleep_while_training` is set for a server on the CPU.
    """
    model = config.model
    arguments: dict[str, Any] = {
        "model": model.name,
        "served_model_name": [model.name],
        "dtype": model.dtype,
        "enforce_eager": model.enforce_eager,
        "trust_remote_code": model.trust_remote_code,
        "enable_auto_tool_choice": model.enable_auto_tool_choice,
        "tensor_parallel_size": config.parallel.tp,
        "data_parallel_size": config.parallel.dp,
        "seed": config.seed,
        "host": config.server.host,
        "port": config.server.port,
        "uvicorn_log_level": config.log.level,
        "disable_uvicorn_access_log": True,
        # No web page has a reason to call a run's server; vLLM's default lets every page do so.
        "allowed_origins": [],
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_scale_out": True,
        "generation_config": "vllm",
        # Some repositories of Mistral hold files in its own format too, which vLLM would prefer to those that the trainer reads.
        "load_format": "hf",
        "config_format": "hf",
    }
    optional = {
        "max_model_len": model.max_model_len,
        "tool_call_parser": model.tool_call_parser if model.enable_auto_tool_choice else None,
        "reasoning_parser": model.reasoning_parser,
        "chat_template": model.chat_template,
        "max_num_seqs": config.max_num_seqs,
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    if config.server.api_key is not None:
        arguments["api_key"] = [config.server.api_key, run_secret]
    if config.enable_lora:
        arguments |= {
            "enable_lora": True,
            "max_loras": config.max_loras,
            "max_cpu_loras": config.max_cpu_loras,
            "max_lora_rank": next(rank for rank in _LORA_RANKS if rank >= config.max_lora_rank),
        }
    if config.return_routed_experts:
        arguments["enable_return_routed_experts"] = True
    if config.weights_transport in IN_MEMORY:
        arguments["weight_transfer_config"] = {"backend": TRANSFER_ENGINE}
    arguments |= _memory_arguments(config, is_cpu=is_cpu)
    if config.deterministic:
        # The rounding of a sum depends on the size of the batch and on how much of the prefix was cached.
        arguments |= {"max_num_seqs": 1, "enable_prefix_caching": False}
    if config.log.json_logging:
        arguments["log_config_file"] = JSON_LOG_CONFIG
    if shard is not None:
        arguments |= {
            "nnodes": shard.num_shards,
            "node_rank": shard.index,
            "master_addr": shard.host,
            "master_port": shard.port,
            "headless": not shard.is_first,
            # vLLM's CPU platform would choose another executor when a node has one rank.
            "distributed_executor_backend": "mp",
        }
    overrides = dtype_overrides(model.dtype, is_cpu=is_cpu) | (config.vllm_args.get("hf_overrides") or {})
    return arguments | config.vllm_args | ({"hf_overrides": overrides} if overrides else {})


def dtype_overrides(dtype: str, *, is_cpu: bool) -> dict[str, Any]:
    """Return the part of `hf_overrides` with which vLLM computes float32 logits on a GPU, as the trainer does there.

    Rounding logits to bfloat16 moves log-probabilities by about 0.02 (`trainer.model.logprobs.choose_product_dtype`). On a CPU both
    round them, because vLLM would convert the whole weight of the head for each token.

    Args:
        dtype: the dtype of the served weights.
    """
    return {"head_dtype": "float32"} if dtype == "bfloat16" and not is_cpu else {}


def position_overrides(config: InferenceConfig, overrides: Mapping[str, object]) -> dict[str, object]:
    """Return the argument `hf_overrides` with the positions of `model.rope_scaling` added; empty without rope_scaling.

    `inference.main` lays it over `vllm_arguments`. The positions are complete, because vLLM replaces the model's own.

    Args:
        overrides: the `hf_overrides` of `vllm_arguments`.

    Raises:
        ConfigError: the model cannot be read, or its layers share no rotary positions.
    """
    model = config.model
    if model.rope_scaling is None:
        return {}
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.from_pretrained(model.name, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model.name = {model.name!r} cannot be loaded: {exc}") from exc
    own = getattr(hf_config, "rope_parameters", None)
    return {"hf_overrides": {**overrides, "rope_parameters": model.rope_scaling.over(own, model=model.name)}}


def _memory_arguments(config: InferenceConfig, *, is_cpu: bool) -> dict[str, Any]:
    if not is_cpu:
        return {"gpu_memory_utilization": config.gpu_memory_utilization, "enable_sleep_mode": config.sleep_while_training}
    if config.sleep_while_training:
        raise ConfigError(
            f"{key_name('inference.sleep_while_training')} = true frees GPU memory, and this server runs on the CPU; remove it"
        )
    return {
        # With the size of the cache given, vLLM does not require that a share of the machine's memory is free.
        "kv_cache_memory_bytes": int(config.cpu_kv_cache_gib * 2**30),
        # A seeded request whose prompt is computed in parts ends the engine ("CPU Generator does not use offset", vLLM 0.32).
        "enable_chunked_prefill": False,
        "block_size": _CPU_BLOCK_SIZE,
    }


def require_known_arguments(names: Iterable[str], *, known: Iterable[str]) -> None:
    """Check that vLLM has every argument of `names`.

    Raises:
        ConfigError: `vllm_args` names an argument that this version of vLLM does not have.
    """
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(
            f"inference.vllm_args.{unknown[0]} is not an argument of the installed vLLM; write its engine arguments with "
            "underscores, as in `vllm serve --help`"
        )


PLAIN_ATTENTION_ENVIRONMENT = {"VLLM_MLA_DISABLE": "1"}
"""Set on the CPU, where vLLM's latent attention knows one size of heads, and in float32 ends the server if the CPU has AMX. Plain
attention computes the same from a larger KV cache."""

ADAPTER_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
"""Enables vLLM's own routes under /v1, which load and unload adapters by name."""

LOOPBACK_ENVIRONMENT = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Lets the processes of one server listen for each other on loopback, and not on the machine's public address."""

LOG_LEVEL_VARIABLE = "SAGEMAKER_CONTAINER_LOG_LEVEL"
"""vLLM imports model_hosting_container_standards, which sets the root logger and its handlers to this level, by default ERROR."""
JSON_LOG_ENVIRONMENT = {"VLLM_LOGGING_CONFIG_PATH": JSON_LOG_CONFIG}
"""Makes the engine's processes log JSON too: they import vLLM again."""

SHARD_ENVIRONMENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Makes every rank of a server over several nodes connect to the store that its first shard opens. Otherwise rank 0 would open a
store itself, on all addresses of its node, and would not get the port that the launcher holds for it."""

EAGER_CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""Set for `enforce_eager` on the CPU. Else vLLM still compiles a small function, which ranks log-probabilities, and g++ runs for
5 to 8 s at the first request of every server."""

COMMON_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"}
"""Turns off usage reports, and the grammar that would correct the policy's tool calls because verifiers marks tools as strict:
under a grammar, probabilities differ from those that the trainer computes, and the policy cannot learn from its mistakes."""
