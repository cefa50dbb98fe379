"""Every kind of causal language model equals plain transformers, packed or not, or is refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM, PreTrainedConfig

from trivet.config.schema.losses import DefaultLossConfig
from trivet.config.schema.trainer import TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.attention import packed
from trivet.trainer.model.export import Exporter
from trivet.trainer.model.policy_model import load_policy
from trivet.trainer.ranks.world import gather_tensor
from trivet.trainer.rows import to_tensors
from trivet.trainer.step import train_step

VOCAB = 64
TOLERANCE = 1e-6
"""Relative tolerance in float32 (invariant 8)."""

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", {}),
    # These caps are small enough to bend what these weights give.
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 4096, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 0.7, "query_pre_attn_scalar": 8},
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 4096, "query_pre_attn_scalar": 8}),
    "qwen3-moe": ("Qwen3MoeConfig", {**EXPERTS, "output_router_logits": False, "router_aux_loss_coef": 0.5}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
}


def merge(*changes: dict[str, object]) -> dict[str, Any]:
    merged: dict[str, Any] = dict(SIZES)
    for change in changes:
        merged |= change
    return merged


def make_config(kind: str, **changes: object) -> PreTrainedConfig:
    class_name, own = MODELS[kind]
    return getattr(transformers, class_name)(**merge(own, changes))


def save_model(config: PreTrainedConfig, directory: Path) -> Path:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_model(make_config(kind), tmp_path_factory.mktemp(kind)) for kind in MODELS}


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradient_equal_those_of_plain_transformers_however_rows_are_packed(
    models: dict[str, Path], make_learner, oracle, kind: str
) -> None:
    examples = oracle.make_examples(count=6, vocab_size=VOCAB)
    config = DefaultLossConfig(token_mask_low=0.0, token_mask_high=1e9, geo_mask_low=0.0, geo_mask_high=1e9, kl_tau=0.1)
    config = config.model_copy(update={"sequence_mask_high": 1e9})
    expected_loss, expected = oracle.loss_and_gradients(models[kind], examples, config)
    learner = make_learner(models[kind], loss=config)
    for name, rows in oracle.layouts(examples).items():
        result = train_step(learner, rows, step=1)
        assert result.loss == pytest.approx(expected_loss, rel=TOLERANCE), name
        named = [(each.removeprefix("causal_lm."), parameter) for each, parameter in learner.model.named_parameters()]
        gradients = {each: gather_tensor(parameter.grad) for each, parameter in named}
        assert oracle.gradient_error(gradients, expected) < 2 * TOLERANCE, name


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_published_scores_the_same_in_plain_transformers(
    models: dict[str, Path], make_learner, oracle, tmp_path: Path, kind: str
) -> None:
    examples = oracle.make_examples(count=3, vocab_size=VOCAB)
    learner = make_learner(models[kind], lr=1e-2)
    train_step(learner, [oracle.make_row(examples)], step=1)
    exporter = Exporter(model=learner.model, tokenizer=NoTokenizer(), dtype=torch.float32)  # type: ignore[arg-type]
    exporter.write(tmp_path, exporter.gather(keep=True))
    # transformers before 5.21 lets Gemma 2 use scaled_dot_product_attention, which leaves out its attention's softcap.
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    row = to_tensors(oracle.make_row(examples[:1]), device=torch.device("cpu"))
    with torch.no_grad():
        ours = learner.model(row).logprobs_N
        logits = plain(input_ids=row.token_ids_1U).logits[0] / examples[0].temperature
    theirs = torch.log_softmax(logits, dim=-1)[row.predictors_N, row.targets_N]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


class NoTokenizer:
    """A stand-in with what the exporter asks of a tokenizer, for models that have none."""

    chat_template = None

    def save_pretrained(self, directory: Path, *, save_jinja_files: bool) -> None:
        pass


def refuse(directory: Path, world, **changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_policy(TrainerModelConfig.model_validate({"name": str(directory), "compute_dtype": "bfloat16", **changes}), world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            transformers.Gemma3Config(text_config=dict(SIZES), vision_config={"hidden_size": 32, "num_hidden_layers": 1}),
            "parts other than a language model (vision_config)",
        ),
        (transformers.T5Config(vocab_size=VOCAB, d_model=32, num_layers=1), "it is an encoder with a decoder"),
        (transformers.Gemma3TextConfig(**merge({"use_bidirectional_attention": True})), "its attention sees later tokens"),
    ],
    ids=["images", "encoder", "later tokens"],
)
def test_a_model_that_is_no_causal_decoder_of_text_is_refused_before_its_weights_are_read(
    config: PreTrainedConfig, reason: str, world, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)  # there are no weights
    assert reason in refuse(tmp_path, world)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4), "carry a state"),
        (transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2), "an attention of its own"),
        (transformers.NemotronConfig(**merge()), "do not tell attention where samples end"),
        (transformers.LlamaConfig(**merge({"rope_parameters": LONGROPE})), "beyond 64 tokens"),
        (
            transformers.Llama4TextConfig(
                **merge(
                    {
                        "layer_types": ["chunked_attention"] * 2,
                        "attention_chunk_size": 16,
                        "intermediate_size_mlp": 48,
                        "num_local_experts": 2,
                    }
                )
            ),
            "within chunks of 16 tokens",
        ),
    ],
    ids=["mamba", "bloom", "nemotron", "longrope", "chunks"],
)
def test_a_model_whose_samples_cannot_be_kept_apart_is_trained_on_one_sample_a_row(
    config: PreTrainedConfig, reason: str, tmp_path: Path, make_learner, oracle, caplog: pytest.LogCaptureFixture
) -> None:
    examples = oracle.make_examples(count=5, vocab_size=VOCAB, prompt_length=20)
    directory = save_model(config, tmp_path)
    learner = make_learner(directory)
    assert not learner.model.packs
    assert reason in caplog.text
    expected_loss, _ = oracle.loss_and_gradients(directory, examples, None)
    result = train_step(learner, [oracle.make_row(examples)], step=1)
    assert result.loss == pytest.approx(expected_loss, rel=10 * TOLERANCE)
    assert result.num_computed_tokens == sum(len(example.token_ids) for example in examples)
    get_state_dict(learner.model, learner.optimizer)  # as for a checkpoint: the optimizer has the model's own parameters


def test_a_model_whose_packed_rows_differ_is_trained_on_one_sample_a_row(
    models: dict[str, Path], make_learner, oracle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The attention of this model multiplies what it is given by a number that packed attention does not know."""
    attend = packed.sdpa_packed

    def attend_otherwise(*args, **kwargs):
        return attend(*args, **kwargs)[0] * 1.5, None

    monkeypatch.setattr(packed, "sdpa_packed", attend_otherwise)
    learner = make_learner(models["llama"])
    assert "log-probabilities of a packed row differ" in caplog.text
    examples = oracle.make_examples(count=5, vocab_size=VOCAB, prompt_length=20)
    expected_loss, _ = oracle.loss_and_gradients(models["llama"], examples, None)
    assert train_step(learner, [oracle.make_row(examples)], step=1).loss == pytest.approx(expected_loss, rel=TOLERANCE)


def test_logits_that_are_changed_in_an_unknown_way_are_refused(world, models, monkeypatch) -> None:
    forward = transformers.LlamaForCausalLM.forward

    def forward_with_raised_logits(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        assert outputs.logits is not None
        outputs.logits = outputs.logits + 2.0
        return outputs

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward_with_raised_logits)
    assert "changes its logits in a way that the trainer does not know" in refuse(models["llama"], world)


def test_a_kernel_that_cannot_cap_scores_is_refused_for_a_model_that_does(world, models) -> None:
    message = refuse(models["gemma2"], world, attn="flash_varlen")
    assert "can neither cap scores nor add sinks as this model does" in message
