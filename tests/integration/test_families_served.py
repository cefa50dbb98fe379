"""A real server agrees with the trainer about each family, before and after it loads what was trained, or refuses it as recorded.

A server of experts that loaded a policy answers as one that was started with it.
docs/benchmarks/models.json has the record; `scripts/docs_models.py --serve` renews it.
"""

import json
from pathlib import Path

import pytest

from support.families import FAMILIES, Family
from support.family_serving import publish_trained, serve_family
from support.served import assert_reload_equals_start

pytestmark = pytest.mark.vllm
MIXTURES = ("Qwen3-MoE", "GPT-OSS", "DeepSeek-V3", "GLM-4-MoE", "OLMoE")
RECORD = json.loads((Path(__file__).parents[2] / "docs" / "benchmarks" / "models.json").read_text())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.key)
def test_a_server_agrees_with_the_trainer_where_it_did_before(family: Family, tmp_path: Path) -> None:
    served = serve_family(family, tmp_path)
    recorded = RECORD["families"][family.key]
    for way, outcome in (("full", served.full), ("lora", served.lora)):
        assert (outcome == "agrees") == (recorded[way] == "agrees"), f"{way}: {outcome}"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in MIXTURES], ids=lambda family: family.key)
def test_a_reloaded_server_of_experts_answers_as_a_fresh_one(family: Family, tmp_path: Path) -> None:
    assert_reload_equals_start(*publish_trained(family, tmp_path), logs=tmp_path, **{"model.dtype": family.served_dtype})
