"""Sections of the inference server, and of the clients that reach servers: the orchestrator and `eval`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from trivet.config.schema.base import MAX_PROCESSES, MAX_ROLLOUTS, MAX_TOKENS, MAX_WAIT_S, Host, Section, ServerAddress
from trivet.config.schema.model import MAX_RANK, RopeScalingConfig
from trivet.config.schema.shared import DEFAULT_MODEL, RoleConfig, WeightsTransport
from trivet.wire.groups import ServerAccess, server_root

VLLM_KEYS = {
    "model": "model.name",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "enforce_eager": "model.enforce_eager",
    "trust_remote_code": "model.trust_remote_code",
    "enable_auto_tool_choice": "model.enable_auto_tool_choice",
    "tool_call_parser": "model.tool_call_parser",
    "reasoning_parser": "model.reasoning_parser",
    "chat_template": "model.chat_template",
    "tensor_parallel_size": "parallel.tp",
    "data_parallel_size": "parallel.dp",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_num_seqs": "max_num_seqs",
    "enable_lora": "enable_lora",
    "enable_return_routed_experts": "return_routed_experts",
    "max_loras": "max_loras",
    "max_cpu_loras": "max_cpu_loras",
    "max_lora_rank": "max_lora_rank",
    "seed": "seed",
    "host": "server.host",
    "port": "server.port",
}
"""Key of `[inference]` by the vLLM argument that it replaces. Both have the same meaning and the same value."""

COMPUTED_VLLM_ARGUMENTS = {
    "served_model_name": "model.name",
    "kv_cache_memory_bytes": "cpu_kv_cache_gib",
    "api_key": "server.api_key",
    "enable_sleep_mode": "sleep_while_training",
    "uvicorn_log_level": "log.level",
}
"""Key of `[inference]` by the vLLM argument that the server computes from it. Their values differ."""

_REASON_OF_SAMPLING = "vLLM would apply sampling defaults of the model, which would bias the importance ratio"
_REASON_OF_NODES = "set deployment.num_infer_nodes to start a server over several nodes"
SERVER_OWNED_VLLM_ARGUMENTS = {
    "logprobs_mode": "log-probabilities must be those of the distribution sampled from",
    "worker_extension_cls": "it is how weights are loaded",
    "weight_transfer_config": "set inference.weights_transport",
    "enable_scale_out": "/inference/v1/generate, which it enables, is how the server is asked for tokens",
    "generation_config": _REASON_OF_SAMPLING,
    "override_generation_config": _REASON_OF_SAMPLING,
    "nnodes": _REASON_OF_NODES,
    "node_rank": _REASON_OF_NODES,
    "master_addr": _REASON_OF_NODES,
    "master_port": _REASON_OF_NODES,
    "headless": _REASON_OF_NODES,
}
"""vLLM's arguments that the server sets itself, and why no other value works."""


class ElasticConfig(Section):
    """Servers that come and go: every address that `hostname` resolves to, or that `servers_file` lists, is a server."""

    hostname: Host | None = None
    """DNS name, looked up every `sync_interval`. A new address joins once it serves the current policy; a gone one is removed."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of every server behind `hostname`."""
    servers_file: Path | None = None
    """File with the address of a server in each line, read every `sync_interval`. A run of several nodes writes one itself."""
    sync_interval: float = Field(default=5.0, gt=0, le=MAX_WAIT_S)
    """Time between two look-ups, seconds."""

    def _problems(self) -> Iterator[str]:
        if (self.hostname is None) == (self.servers_file is None):
            yield "set hostname or servers_file, which name the servers"

    @property
    def source(self) -> str:
        """The key that is the source of the addresses, with its value, for messages."""
        if self.servers_file is not None:
            return f"client.elastic.servers_file = {str(self.servers_file)!r}"
        return f"client.elastic.hostname = {self.hostname!r}"


class ClientConfig(Section):
    """The inference servers, and how to reach them."""

    base_url: list[ServerAddress] = Field(default=["http://127.0.0.1:8000/v1"], min_length=1)
    """One or more servers. All must be up when the run starts; one that fails later is marked unhealthy until it is back."""
    elastic: ElasticConfig | None = None
    """Find the servers by DNS name instead of `base_url`; they may come and go."""
    api_key_var: list[str] = Field(default=["OPENAI_API_KEY"], min_length=1)
    """Environment variable that holds the key: one for all servers, or one per `base_url`. A local server needs none."""
    headers: dict[str, str] = {}
    """HTTP headers of every request to every server."""
    timeout: float = Field(default=1200.0, gt=0, le=MAX_WAIT_S)
    """Longest time for one request, seconds."""
    admin_timeout: float = Field(default=300.0, gt=0, le=MAX_WAIT_S)
    """Longest time for loading weights and for a question about a server's state, seconds; then the server is marked unhealthy."""
    wait_for_ready_timeout: float = Field(default=1800.0, gt=0, le=MAX_WAIT_S)
    """Longest wait for a server to become ready at start, or to sleep, and longest time without any server later, seconds."""

    def _problems(self) -> Iterator[str]:
        if len(self.api_key_var) not in (1, len(self.base_url)):
            yield (
                f"api_key_var names {len(self.api_key_var)} variables for {len(self.base_url)} servers in base_url; name one "
                "for all, or one per server"
            )
        if len({server_root(url) for url in self.base_url}) != len(self.base_url):
            yield f"base_url names a server twice: {', '.join(self.base_url)}; name each once"

    def request_headers(self, base_url: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the HTTP headers of requests to the server at `base_url`, with its API key if the variable of the key is set."""
        key = self.access.api_key(base_url, environ)
        return {**self.headers, **({"Authorization": f"Bearer {key}"} if key else {})}

    @property
    def access(self) -> ServerAccess:
        """The data with which an environment worker reaches the servers."""
        return ServerAccess(
            base_urls=list(self.base_url),
            key_variables=list(self.api_key_var),
            headers=dict(self.headers),
            timeout_s=self.timeout,
        )


class ConcurrencyConfig(Section):
    """Rollouts in flight, adapted to the servers' load as their `/metrics` report it.

    The limit starts at what `oversampling_factor` and `max_concurrent` allow. It grows while servers have a short queue and free
    space in their cache, up to `max_concurrent`, or without it to as many as `max_async_level` lets start. It falls when all
    servers are full and evict sequences, which they compute again, or when more requests wait than run. A full server gets a
    rollout only when all others are full too, or as many of its own have ended.
    """

    adaptive: bool = True
    """Adapt the limit; false keeps the first one, and spreads rollouts evenly. Servers without `/metrics` are not considered."""
    initial_inflight: int | None = Field(default=None, ge=1)
    """Rollouts in flight at the start; unset: as many as allowed."""
    min_inflight: int = Field(default=1, ge=1)
    """The limit never falls below this. A group always starts whole. A CPU may be fastest with few long rollouts."""
    interval: float = Field(default=5.0, gt=0)
    """Time between two readings of the servers' load, seconds."""


class ServerConfig(Section):
    """The address of the server, and who may use it."""

    host: Host = "127.0.0.1"
    """Interface to listen on."""
    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port; the launcher replaces it by a free one if it is taken."""
    api_key: str | None = Field(default=None, min_length=1)
    """Bearer token that requests must carry; unset: anyone may ask. Other clients read it from the variable in api_key_var."""
    weight_dirs: list[Path] = []
    """Directories below which weights and adapters may be loaded from, besides `weights/` in output_dir."""


class InferenceModelConfig(Section):
    """The model that is served, and how it reads and writes conversations."""

    name: str = DEFAULT_MODEL
    """Hugging Face name or a directory."""
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Dtype of the served weights. `auto` is the trainer's compute dtype, chosen as `trainer.model.compute_dtype` says."""
    max_model_len: int | None = Field(default=None, ge=2, le=MAX_TOKENS)
    """Longest prompt plus completion, tokens; unset: the model's own limit."""
    enforce_eager: bool = False
    """No compilation: starts faster, generates slower."""
    trust_remote_code: bool = False
    """Run code that the model's repository ships."""
    enable_auto_tool_choice: bool = False
    """Let the model decide to call tools."""
    tool_call_parser: str | None = "hermes"
    """How tool calls are written by this model; used with enable_auto_tool_choice."""
    reasoning_parser: str | None = None
    """How thinking is marked by this model, e.g. `qwen3`."""
    rope_scaling: RopeScalingConfig | None = None
    """Other rotary positions than the model's own. A run takes them from trainer.model.rope_scaling, or the other way round."""
    chat_template: str | None = None
    """Jinja template, or its file; unset: the tokenizer's own. A run takes it from trainer.tokenizer.chat_template."""


class ParallelConfig(Section):
    """The server's GPUs, divided into replicas."""

    tp: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Tensor-parallel GPUs per replica."""
    dp: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Replicas; the launcher sets GPUs / tp."""


class InferenceConfig(RoleConfig):
    """`uv run inference @ inference.toml`."""

    name: str = "inference"
    """Name of the server among the processes of its run, under which it reports; the launcher sets it."""
    is_teacher: bool = False
    """Set by the launcher: it serves the teacher, and reports as that."""
    server: ServerConfig = ServerConfig()
    model: InferenceModelConfig = InferenceModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of GPU memory for weights and KV cache."""
    sleep_while_training: bool = False
    """Free the GPU while the trainer learns, for a model that does not fit next to it. Needs max_async_level = 0."""
    cpu_kv_cache_gib: float = Field(default=1.0, gt=0, le=65536)
    """Size of the KV cache on a machine without a GPU, GiB."""
    max_num_seqs: int | None = Field(default=None, ge=1, le=MAX_ROLLOUTS)
    """Sequences generated at one time; unset: vLLM's default."""
    weight_cache: Path | None = None
    """Directory on a local disk for policies that are fetched, two at a time; unset: that of temporary files. All servers of
    this machine and user share it, and remove from it what no server uses any more."""
    enable_lora: bool = False
    """Serve adapters: published ones, and those of /load_lora_adapter. A run with trainer.model.lora sets it."""
    max_loras: int = Field(default=8, ge=1, le=MAX_ROLLOUTS)
    """Adapters that requests of one moment may use, the policy's included; each takes memory for its weights."""
    max_cpu_loras: int = Field(default=100, ge=1, le=MAX_ROLLOUTS)
    """Adapters that stay loaded; the one unused for longest is evicted."""
    max_lora_rank: int = Field(default=16, ge=1, le=MAX_RANK)
    """Largest rank of an adapter, rounded up to one that vLLM has. A run takes it from trainer.model.lora.rank."""
    return_routed_experts: bool = False
    """Return the experts that a mixture chose for each token, with every answer. A run with trainer.router_replay sets it."""
    weights_transport: WeightsTransport = "files"
    """How the server can receive policies. A run with weights.transport sets it; a server for such a run needs the same value."""
    seed: int = Field(default=0, ge=0)
    """Seeds sampling of requests that carry no seed."""
    deterministic: bool = False
    """One sequence at a time, and nothing computed for another request is reused: equal requests get equal bytes."""
    vllm_args: dict[str, Any] = {}
    """Further vLLM engine arguments by name, e.g. `{ swap_space = 4 }`; one that has a key above is refused."""
