"""A real server agrees with the trainer about each family, before and after it loads what was trained, or refuses it as recorded.

docs/benchmarks/models.json has the record; `scripts/docs_models.py --serve` renews it.
"""

import json
from pathlib import Path

import pytest

from support.families import FAMILIES, Family
from support.family_serving import serve_family

pytestmark = pytest.mark.vllm
RECORD = json.loads((Path(__file__).parents[2] / "docs" / "benchmarks" / "models.json").read_text())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.key)
def test_a_server_agrees_with_the_trainer_where_it_did_before(family: Family, tmp_path: Path) -> None:
    served = serve_family(family, tmp_path)
    recorded = RECORD["families"][family.key]
    for way, outcome in (("full", served.full), ("lora", served.lora)):
        assert (outcome == "agrees") == (recorded[way] == "agrees"), f"{way}: {outcome}"
