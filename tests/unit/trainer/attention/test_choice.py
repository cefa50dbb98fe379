"""Which attention is taken, as tables over what a GPU can do."""

import pytest
from transformers import DeepseekV3Config, Qwen3Config

from trivet.errors import ConfigError
from trivet.trainer.attention.choice import HeadDims, choose_attention

HEADS = HeadDims(query=128, value=128)
FA4 = "flash_attn.cute.interface"


@pytest.mark.parametrize(
    ("capability", "packages", "dtype", "has_special_scores", "heads", "expected"),
    [
        ((9, 0), {"flash_attn", "flash_attn_interface"}, "bfloat16", False, HEADS, "flash_attention_3"),
        ((9, 0), {"flash_attn"}, "bfloat16", False, HEADS, "flash_varlen"),
        ((9, 0), {FA4}, "bfloat16", False, HEADS, "flash_attention_4"),
        ((9, 0), {"flash_attn_interface", FA4}, "bfloat16", False, HEADS, "flash_attention_3"),
        ((10, 0), {"flash_attn_interface", FA4}, "bfloat16", False, HEADS, "flash_attention_4"),
        ((10, 0), {"flash_attn_interface"}, "bfloat16", False, HEADS, "flash_varlen"),
        ((12, 0), {"flash_attn_interface", FA4}, "bfloat16", False, HEADS, "flash_varlen"),
        ((8, 0), {FA4}, "bfloat16", False, HEADS, "flash_varlen"),
        ((9, 0), {FA4}, "float32", False, HEADS, "sdpa"),
        ((9, 0), {FA4}, "bfloat16", True, HEADS, "sdpa"),
        ((9, 0), {FA4}, "bfloat16", False, HeadDims(query=256, value=256), "flash_varlen"),
        ((9, 0), {"flash_attn_interface", FA4}, "bfloat16", False, HeadDims(query=256, value=256), "flash_attention_3"),
        ((8, 0), {"flash_attn", "flash_attn_interface"}, "bfloat16", False, HEADS, "flash_varlen"),
        ((9, 0), {"flash_attn_interface"}, "bfloat16", True, HEADS, "sdpa"),
        ((9, 0), {"flash_attn_interface"}, "float32", False, HEADS, "sdpa"),
        ((7, 5), set[str](), "float32", False, HEADS, "sdpa"),
        ((7, 5), set[str](), "bfloat16", False, HEADS, "sdpa"),
        ((9, 0), {"flash_attn_interface"}, "bfloat16", False, HeadDims(query=192, value=128), "sdpa"),
        ((8, 0), set[str](), "bfloat16", False, HeadDims(query=512, value=512), "sdpa"),
        ((8, 0), set[str](), "bfloat16", False, HeadDims(query=100, value=100), "sdpa"),
        ((8, 0), set[str](), "bfloat16", False, HeadDims(query=256, value=256), "flash_varlen"),
    ],
)
def test_auto_takes_the_fastest_that_runs_on_cuda(
    capability: tuple[int, int], packages: set[str], dtype: str, has_special_scores: bool, heads: HeadDims, expected: str
) -> None:
    found = choose_attention(
        "auto",
        device_type="cuda",
        capability=capability,
        is_float32=dtype == "float32",
        has_special_scores=has_special_scores,
        heads=heads,
        is_installed=packages.__contains__,
    )
    assert found == expected


@pytest.mark.parametrize(
    ("attn", "capability", "heads", "reason"),
    [
        ("flash_varlen", (7, 5), HEADS, r"needs compute capability 8\.0, this GPU has 7\.5; set"),
        ("flash_varlen", (9, 0), HeadDims(query=192, value=128), r"this model's keys have 192, its values 128; set"),
        ("flash_attention_3", (8, 0), HEADS, r"needs compute capability 9\.0, this GPU has 8\.0; set"),
        ("flash_attention_4", (12, 0), HEADS, r"needs compute capability 9\.0 or 10\.0, this GPU has 12\.0; set"),
        ("flash_attention_4", (9, 0), HeadDims(query=256, value=256), r"at most 128 .* this model's keys have 256"),
    ],
)
def test_flash_attention_that_the_gpu_or_the_model_does_not_allow_is_refused(
    attn: str, capability: tuple[int, int], heads: HeadDims, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose_attention(
            attn,
            device_type="cuda",
            capability=capability,
            has_special_scores=False,
            heads=heads,
            is_installed=lambda package: True,
        )


def test_the_features_of_heads_come_from_the_models_configuration() -> None:
    assert HeadDims.from_config(Qwen3Config(head_dim=96)) == HeadDims(query=96, value=96)
    latent = DeepseekV3Config(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert HeadDims.from_config(latent) == HeadDims(query=192, value=128)


def test_an_attention_whose_package_is_missing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs the Python module flash_attn_interface, which is not installed"):
        choose_attention(
            "flash_attention_3",
            device_type="cuda",
            capability=(9, 0),
            has_special_scores=False,
            heads=HEADS,
            is_installed=set[str]().__contains__,
        )
