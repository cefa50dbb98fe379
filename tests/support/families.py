"""Toys of the families of language models that people train: a few small layers, with what is special about each family.

Used by the tests of the trainer and of the server, and by `scripts/docs_models.py`, which writes docs/models.md from it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WINDOW = 8
"""Tokens of the toys' attention windows: shorter than most samples of the tests."""
_SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 98,
    "eos_token_id": 100,
    "bos_token_id": None,
    "attention_dropout": 0.0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
_NEMOTRON_H = {
    "num_hidden_layers": 3,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "chunk_size": 8,
}
_SLIDING_THEN_FULL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family, and the configuration of its toy."""

    name: str
    config_class: str
    special: str
    """What sets its arithmetic apart, as far as the toy has it; for the table."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Keys of the configuration beyond `_SIZES`."""
    served_changes: dict[str, Any] = field(default_factory=dict)
    """Sizes that vLLM's kernels for the CPU need."""
    served_dtype: str = "float32"
    """The dtype in which vLLM's kernels for the CPU compute it."""
    packs: bool = True
    """Whether the trainer's rows hold several samples."""
    attention: str = "eager"
    """Attention of transformers that computes what the family's models were trained with."""
    without: frozenset[str] = frozenset()
    """Keys of `_SIZES` that the configuration does not take."""

    @property
    def key(self) -> str:
        """Name of the family in test ids and directories."""
        return self.name.lower().replace(" ", "-").replace(".", "")

    @property
    def class_name(self) -> str:
        """Name of the class in transformers, which is the architecture for a server."""
        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[getattr(transformers, self.config_class).model_type]

    def make_config(self, **changes: Any) -> PreTrainedConfig:
        """Return the toy's configuration."""
        keys = {key: value for key, value in _SIZES.items() if key not in self.without}
        return getattr(transformers, self.config_class)(**{**keys, **self.changes, **changes})

    def make_model(self, **changes: Any) -> PreTrainedModel:
        """Make the toy. Its weights are larger than usual, so that windows, caps, scales and sinks change its results."""
        model = AutoModelForCausalLM.from_config(self.make_config(**changes), dtype=torch.float32)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 0.12 if parameter.dim() > 1 else parameter + noise * 0.1)
        return model.eval()

    def save(self, directory: Path, **changes: Any) -> Path:
        """Write the toy's files."""
        self.make_model(**changes).save_pretrained(directory)
        return directory


FAMILIES = (
    Family(
        name="Llama 3",
        config_class="LlamaConfig",
        special="rope scaling of Llama 3, biases",
        changes={"rope_parameters": _LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True},
    ),
    Family(
        name="Qwen2.5",
        config_class="Qwen2Config",
        special="biases of queries, keys and values",
        changes={"tie_word_embeddings": True},
    ),
    Family(
        name="Qwen2 with windows",
        config_class="Qwen2Config",
        special="window in some layers",
        changes={**_SLIDING_THEN_FULL, "use_sliding_window": True},
    ),
    Family(
        name="Qwen2-MoE",
        config_class="Qwen2MoeConfig",
        special="experts beside a shared one",
        changes={**_EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    Family(name="Qwen3", config_class="Qwen3Config", special="norm of queries and keys", changes={"tie_word_embeddings": True}),
    Family(name="Qwen3-MoE", config_class="Qwen3MoeConfig", special="experts", changes=_EXPERTS),
    Family(
        name="Qwen3-Next",
        config_class="Qwen3NextConfig",
        served_changes={"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        served_dtype="bfloat16",
        packs=False,
        special="gated delta net, gated attention, partial rotary positions, experts",
        changes={**_EXPERTS, **_GATED_DELTA, "shared_expert_intermediate_size": 32},
    ),
    Family(
        name="Qwen3.5",
        config_class="Qwen3_5TextConfig",
        served_changes={"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        served_dtype="bfloat16",
        packs=False,
        special="gated delta net, gated attention, partial rotary positions",
        changes=_GATED_DELTA,
    ),
    Family(name="Gemma", config_class="GemmaConfig", special="scaled embedding, norms of 1 + weight"),
    Family(
        name="Gemma 2",
        config_class="Gemma2Config",
        special="window in every other layer, caps of scores and logits",
        changes={
            **_SLIDING_THEN_FULL,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    Family(
        name="Gemma 3",
        config_class="Gemma3TextConfig",
        special="window in most layers, a rope of its own there, norm of queries and keys",
        changes={**_SLIDING_THEN_FULL, "query_pre_attn_scalar": 64},
    ),
    Family(
        name="Mistral",
        config_class="MistralConfig",
        special="window in every layer",
        changes={"sliding_window": WINDOW},
    ),
    Family(name="Mixtral", config_class="MixtralConfig", special="experts", changes=_LOCAL_EXPERTS),
    Family(
        name="Ministral",
        config_class="MinistralConfig",
        special="window in some layers",
        changes=_SLIDING_THEN_FULL,
    ),
    Family(
        name="Ministral 3",
        config_class="Ministral3Config",
        special="YaRN, queries scaled by position",
        changes={"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    ),
    Family(
        name="Phi-3 and Phi-4",
        config_class="Phi3Config",
        special="window in every layer, partial rotary positions, fused projections",
        changes={"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
    ),
    Family(
        name="Phi-3 long",
        config_class="Phi3Config",
        packs=False,
        special="LongRoPE beyond the original length",
        changes={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 12,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.05 * i for i in range(16)],
                "long_factor": [2.0 + 0.3 * i for i in range(16)],
                "original_max_position_embeddings": 12,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    Family(
        name="Phi-3.5-MoE",
        config_class="PhimoeConfig",
        special="experts, head with bias",
        changes={**_LOCAL_EXPERTS, "sliding_window": None, "lm_head_bias": True, "input_jitter_noise": 0.0},
    ),
    Family(
        name="Phi-2",
        config_class="PhiConfig",
        special="head with bias, partial rotary positions, attention beside the MLP",
        changes={"partial_rotary_factor": 0.5},
    ),
    Family(
        name="GPT-OSS",
        config_class="GptOssConfig",
        special="sinks, window in every other layer, experts with biases",
        changes={**_LOCAL_EXPERTS, **_SLIDING_THEN_FULL, "rope_parameters": {**_YARN, "truncate": False}},
    ),
    Family(
        name="OLMoE",
        config_class="OlmoeConfig",
        special="experts, norm of all queries and keys at once",
        changes={"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
    ),
    Family(
        name="OLMo 2",
        config_class="Olmo2Config",
        special="norms behind attention and MLP, norm of all queries and keys at once",
    ),
    Family(
        name="OLMo 3",
        config_class="Olmo3Config",
        special="as OLMo 2, window in most layers",
        changes=_SLIDING_THEN_FULL,
    ),
    Family(
        name="SmolLM3",
        config_class="SmolLM3Config",
        special="some layers without positions",
        changes={"no_rope_layers": [1, 0], "tie_word_embeddings": True},
    ),
    Family(
        name="Granite",
        config_class="GraniteConfig",
        special="scales of embedding, scores, residuals and logits",
        changes={
            "logits_scaling": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 6.0,
        },
    ),
    Family(
        name="Granite 4",
        config_class="GraniteMoeHybridConfig",
        packs=False,
        special="Mamba 2 layers, experts beside a shared MLP, scales as Granite",
        changes={
            **_LOCAL_EXPERTS,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 32,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_chunk_size": 8,
            "logits_scaling": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 6.0,
        },
    ),
    Family(
        name="LFM2",
        config_class="Lfm2Config",
        packs=False,
        special="short convolutions",
        changes={
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "block_ff_dim": 96,
            # The configurations of the family's models have these, and vLLM reads them.
            "block_dim": 128,
            "conv_dim": 128,
        },
    ),
    Family(
        name="Nemotron",
        config_class="NemotronConfig",
        packs=False,
        special="partial rotary positions, LayerNorm of 1 + weight, squared ReLU",
    ),
    Family(
        name="Nemotron-H",
        config_class="NemotronHConfig",
        packs=False,
        special="Mamba 2 layers, layers of an MLP alone",
        changes={**_NEMOTRON_H, "layers_block_type": ["mamba", "attention", "mlp"]},
    ),
    Family(
        name="Nemotron 3",
        config_class="NemotronHConfig",
        packs=False,
        special="as Nemotron-H, layers of experts alone",
        changes={
            **_NEMOTRON_H,
            **_ROUTED,
            "layers_block_type": ["mamba", "attention", "moe"],
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    Family(
        name="Seed-OSS",
        config_class="SeedOssConfig",
        special="biases of queries, keys and values",
        changes={"residual_dropout": 0.0},
    ),
    Family(
        name="Exaone 4",
        config_class="Exaone4Config",
        special="window in most layers, no positions in the others",
        changes=_SLIDING_THEN_FULL,
    ),
    Family(
        name="Cohere",
        config_class="CohereConfig",
        special="scale of logits, interleaved rotary positions, attention beside the MLP",
        changes={"logit_scale": 0.25},
    ),
    Family(
        name="Cohere 2",
        config_class="Cohere2Config",
        special="as Cohere, window in most layers, no positions in the others",
        changes={**_SLIDING_THEN_FULL, "logit_scale": 0.25},
    ),
    Family(
        name="GLM-4",
        config_class="Glm4Config",
        special="partial, interleaved rotary positions, norms before and behind",
        changes={"partial_rotary_factor": 0.5},
    ),
    Family(
        name="GLM-4-MoE",
        config_class="Glm4MoeConfig",
        special="partial rotary positions, experts beside a shared one, balanced by a buffer",
        changes={**_ROUTED, "partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True},
    ),
    Family(
        name="DeepSeek-V3",
        config_class="DeepseekV3Config",
        special="multi-head latent attention, experts beside a shared one, balanced by a buffer",
        changes={
            **_ROUTED,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            # The configurations of the family's models have these, and vLLM reads them.
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    Family(
        name="GPT-NeoX",
        config_class="GPTNeoXConfig",
        special="partial rotary positions, fused projections, attention beside the MLP, biases",
        changes={"rotary_pct": 0.25},
    ),
    Family(
        name="GPT-2",
        config_class="GPT2Config",
        special="learned positions, Conv1D projections, biases",
        changes={"n_inner": 96, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    Family(
        name="Falcon",
        config_class="FalconConfig",
        packs=False,
        special="fused projections, attention beside the MLP",
        changes={"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
        without=frozenset({"head_dim"}),
    ),
    Family(
        name="Falcon with ALiBi",
        config_class="FalconConfig",
        packs=False,
        special="ALiBi, multi-query attention",
        changes={"alibi": True, "parallel_attn": False, "bias": True},
        attention="sdpa",  # transformers 5.19 adds ALiBi twice in its eager attention
        without=frozenset({"head_dim"}),
    ),
    Family(
        name="Falcon-H1",
        config_class="FalconH1Config",
        packs=False,
        special="Mamba 2 beside attention in each layer, multipliers",
        changes={
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
    ),
    Family(
        name="StarCoder2",
        config_class="Starcoder2Config",
        special="window in every layer, biases, LayerNorm",
        changes={"sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    Family(
        name="MiniCPM3",
        config_class="MiniCPM3Config",
        special="multi-head latent attention, scales of embedding, residuals and head",
        changes={
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "dim_model_base": 64,
            "scale_emb": 6.0,
        },
    ),
    Family(
        name="StableLM",
        config_class="StableLmConfig",
        packs=False,
        special="partial rotary positions, LayerNorm",
        changes={"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    ),
    Family(name="ERNIE 4.5", config_class="Ernie4_5Config", special="interleaved rotary positions"),
    Family(name="Helium", config_class="HeliumConfig", special="interleaved rotary positions"),
    Family(name="HunYuan", config_class="HunYuanDenseV1Config", special="norm of queries and keys behind positions"),
    Family(name="Arcee", config_class="ArceeConfig", special="squared ReLU"),
)
