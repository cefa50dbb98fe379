from pathlib import Path

import pytest

from trivet.config.load import LoadedConfig, load_config
from trivet.config.schema.model import LoRAConfig
from trivet.config.schema.rl import RLConfig
from trivet.errors import ConfigError


def load(tmp_path: Path, text: str) -> LoadedConfig[RLConfig]:
    file = tmp_path / "rl.toml"
    file.write_text(f"max_steps = 5\norchestrator.rollouts_per_example = 2\n{text}")
    return load_config(RLConfig, ["@", str(file)], environ={})


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def test_without_the_section_every_weight_is_trained_and_no_adapter_served(tmp_path: Path) -> None:
    config = load(tmp_path, "").config
    assert config.trainer.model.lora is None
    assert config.inference is not None
    assert not config.inference.enable_lora


@pytest.mark.parametrize(("text", "rank"), [("[trainer.model.lora]\n", 16), ("[trainer.model.lora]\nrank = 40\n", 40)])
def test_the_server_serves_adapters_of_the_trainers_rank(tmp_path: Path, text: str, rank: int) -> None:
    config = load(tmp_path, text).config
    assert config.trainer.model.lora is not None
    assert config.trainer.model.lora.rank == rank
    assert config.inference is not None
    assert (config.inference.enable_lora, config.inference.max_lora_rank) == (True, rank)


def test_the_older_place_of_the_section_is_accepted_with_a_line(tmp_path: Path) -> None:
    loaded = load(tmp_path, "[trainer.model.experimental.lora]\nrank = 8\nalpha = 16\n")
    assert loaded.config.trainer.model.lora == LoRAConfig(rank=8, alpha=16.0)
    assert any("trainer.model.experimental.lora.rank is called trainer.model.lora.rank here" in said for said in loaded.notices)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[trainer.model.lora]\n[inference]\nenable_lora = false\n", "inference.enable_lora must be true with trainer.model"),
        ("[trainer.model.lora]\nrank = 32\n[inference]\nmax_lora_rank = 16\n", "max_lora_rank (16) must be >= trainer.model"),
        ('[trainer.model.lora]\nmodules_to_save = ["norm"]\n', 'modules_to_save (["norm"]) cannot be served'),
        ("[inference]\nenable_lora = true\nmax_cpu_loras = 4\n", "max_cpu_loras (4) must be >= inference.max_loras (8)"),
        ('[trainer.model.lora]\ntarget_modules = ["(q"]\n', "'(q' is neither a name nor a regular expression"),
        ("[trainer.model.lora]\ntarget_modules = []\n", "must name at least one module"),
        ("[trainer.model.lora]\nrank = 1000\n", "trainer.model.lora.rank"),
        ("[inference.vllm_args]\nenable_lora = true\n", "set inference.enable_lora instead"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_someone_elses_server_needs_no_key_of_ours(tmp_path: Path) -> None:
    config = load(tmp_path, 'inference = "None"\n[trainer.model.lora]\n').config
    assert config.inference is None
