"""Sections of `vf-rl`, the dialect of verifiers' trainer: `model`, `[env]`, `[inference]`, `[trainer]` and `[trainer.args]`.

Defaults are those that verifiers documents. `dialects.vf_translation` turns such a configuration into that of a run. The sections
are in this package because the other commands must ignore environment variables that set these keys.
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from trivet.config.schema.base import MAX_ROLLOUTS, MAX_TOKENS, MAX_WAIT_S, Section
from trivet.config.schema.model import MAX_RANK

ENV_RESPONSES_ARE_MASKED = (
    "what the environment says is always masked: the policy did not sample it, so there is no log-probability to weigh it by;"
    " remove the key, and to learn such texts too, train on conversations with `uv run sft` and data.loss_mask.tool = true or"
    " data.loss_mask.user = true"
)


class VfEnvConfig(Section):
    """The environment to train on."""

    id: str
    """Package name of the environment; an owner before it, as in `owner/name`, is ignored."""
    args: dict[str, Any] = {}
    """Passed to load_environment."""


class VfInferenceConfig(Section):
    """The inference server."""

    gpus: int = Field(ge=1)
    """GPUs of the inference server, the first ones. With one GPU, or none, both roles share it."""
    args: dict[str, Any] = {}
    """Engine arguments of vLLM by name, e.g. `enforce_eager = true`."""


class VfWandbConfig(Section):
    """Logging to Weights & Biases."""

    project: str = "trivet"
    """W&B project."""
    name: str | None = None
    """Run name; unset: run_name."""
    offline: bool = False
    """Write to disk only."""


class VfTrainerArgs(Section):
    """Arguments of the trainer."""

    run_name: str | None = Field(default=None, pattern=r"^[^/]+$")
    """The run's directory is outputs/<run_name>; unset: the environment's name."""
    output_dir: str | None = None
    """The run's directory, instead of outputs/<run_name>."""
    overwrite_output_dir: bool = False
    """Remove what an earlier run left in the run's directory."""
    use_lora: bool = True
    """Train adapters; false: all weights, with a learning rate of about a tenth."""
    lora_rank: int = Field(default=16, ge=1, le=MAX_RANK)
    """Inner dimension of each adapter."""
    lora_alpha: float = Field(default=16.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are zeroed in training."""
    lora_target_modules: list[str] = ["q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "up_proj"]
    """Linear modules that get an adapter."""
    lora_modules_to_save: list[str] | None = None
    """Modules that are trained whole; servers cannot load them."""
    lora_use_rslora: bool = False
    """Scale by alpha / sqrt(rank)."""
    learning_rate: float = Field(default=1e-5, ge=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    """How the learning rate changes; linear and cosine fall to 0 at max_steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps from 0 to the peak."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """The same as a share of max_steps, where warmup_steps is 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the gradient's norm to this."""
    bf16: bool | Literal["auto"] = "auto"
    """Compute in bfloat16 over float32 weights; false: in float32; `auto`: in bfloat16 where the device multiplies in it."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    micro_batch_size: int = Field(default=8, ge=1, le=MAX_ROLLOUTS)
    """Rollouts per GPU at one time; times the GPUs it divides batch_size. Rows are packed here to at most max_seq_len tokens."""
    batch_size: int = Field(default=512, ge=1, le=MAX_ROLLOUTS)
    """Rollouts per step."""
    rollouts_per_example: int = Field(default=16, ge=1, le=MAX_ROLLOUTS)
    """Rollouts of one example, compared with each other."""
    max_steps: int = Field(default=500, ge=1)
    """Steps of the run."""
    max_seq_len: int = Field(default=2048, ge=2, le=MAX_TOKENS)
    """Tokens of a rollout that are trained on, its prompt included."""
    max_prompt_len: int | None = Field(default=None, ge=1)
    """Prompts are not cut by themselves: max_seq_len bounds prompt and completion."""
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Tokens per model turn; unset: up to max_seq_len."""
    temperature: float = Field(default=0.7, gt=0)
    """Temperature of sampling; the trainer's log-probabilities follow it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int | None = Field(default=None, ge=-1)
    """Sample among the k likeliest."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens below this share of the likeliest."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """1 is off."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """0 is off."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """0 is off."""
    mask_ratio_low: float = Field(default=0.125, ge=0)
    """Tokens with a smaller importance ratio carry no gradient."""
    mask_ratio_high: float = Field(default=8.0, gt=0)
    """Tokens with a larger importance ratio carry no gradient."""
    mask_env_responses: bool = True
    """Only `true`: what the environment says is never trained on, because the policy did not sample it."""
    mask_truncated_completions: bool = False
    """Train on no token of a rollout that was cut."""
    zero_truncated_completions: bool = False
    """Give a rollout that was cut the reward 0."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference policy."""
    sync_ref_model: bool = False
    """Replace the reference policy by the current one every ref_model_sync_steps."""
    ref_model_sync_steps: int = Field(default=100, ge=1)
    """Steps between two replacements of the reference policy."""
    num_iterations: int = Field(default=1, ge=1)
    """Optimizer updates on each batch."""
    num_batches_ahead: int = Field(default=1, ge=0)
    """Batches that generation may be ahead of training."""
    max_concurrent: int = Field(default=1024, ge=1, le=MAX_ROLLOUTS)
    """Rollouts in flight at most."""
    generation_timeout: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """Longest time for the rollouts of one example, seconds."""
    seed: int = Field(default=42, ge=0)
    """Seeds every role."""
    eval_strategy: Literal["no", "steps"] = "no"
    """Whether policies are evaluated on the environment's evaluation data during the run."""
    eval_steps: int = Field(default=50, ge=1)
    """Policy versions between evaluations."""
    save_strategy: Literal["no", "steps"] = "steps"
    """Whether checkpoints are written before the last step."""
    save_steps: int = Field(default=50, ge=1)
    """Steps between checkpoints."""
    save_total_limit: int | None = Field(default=None, ge=1)
    """Keep this many of the newest checkpoints to resume from; unset: all."""
    resume_from_checkpoint: bool | str = False
    """True: go on from the newest; `checkpoint-50`, or a path that ends so: from that one."""
    logging_steps: int = Field(default=1, ge=1)
    """Steps between lines on the console, and between samples in W&B."""
    log_completions: bool = True
    """Show rollouts on the console and in W&B."""
    num_completions_to_print: int = Field(default=1, ge=1)
    """Rollouts shown each time."""
    report_to: str | list[str] = "none"
    """`wandb`, `tensorboard`, `trackio`, `mlflow`, `opentelemetry`, several of them, or `none`. A table [trainer.args.wandb] turns
    W&B on too."""
    wandb: VfWandbConfig | None = None
    vllm_server_host: str = "127.0.0.1"
    """Interface on which the inference server listens."""
    vllm_server_port: int = Field(default=8000, ge=1, le=65535)
    """TCP port; the launcher takes a free one if it is taken."""
    vllm_server_timeout: float = Field(default=300.0, gt=0, le=MAX_WAIT_S)
    """Longest wait for the inference server to be ready, seconds."""

    def _problems(self) -> Iterator[str]:
        if not self.mask_env_responses:
            yield f"mask_env_responses = false: {ENV_RESPONSES_ARE_MASKED}"


class VfTrainerConfig(Section):
    """The trainer."""

    gpus: int = Field(ge=1)
    """GPUs of the trainer, those after the inference server's."""
    args: VfTrainerArgs = VfTrainerArgs()


class VfRLConfig(Section):
    """`uv run vf-rl @ file.toml`."""

    model: str
    """Hugging Face name or a directory."""
    env: VfEnvConfig
    inference: VfInferenceConfig
    trainer: VfTrainerConfig
