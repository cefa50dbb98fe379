"""Every file under configs/ loads for the command that its name says."""

from pathlib import Path

import pytest

from trivet.config.load import load_config
from trivet.config.schema.base import Section
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.dialects.vf_translation import load_run

CONFIGS = Path(__file__).parents[3] / "configs"
KINDS: dict[str, type[Section]] = {
    "sft": SftConfig,
    "eval": EvalConfig,
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
}
FILES = sorted(CONFIGS.rglob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_a_file_loads_in_todays_spelling(file: Path) -> None:
    kind = VfRLConfig if file.parent.name == "vf-rl" else KINDS.get(file.stem.split("_")[0], RLConfig)
    loaded = load_config(kind, ["@", str(file)], environ={})
    assert not [notice for notice in loaded.notices if " called " in notice]


@pytest.mark.parametrize("file", sorted((CONFIGS / "vf-rl").glob("*.toml")), ids=lambda file: file.stem)
def test_a_file_of_the_dialect_is_a_run(file: Path) -> None:
    run = load_run(load_config(VfRLConfig, ["@", str(file)], environ={}), environ={}).config
    assert [env.id for env in run.orchestrator.env] == [file.stem]
