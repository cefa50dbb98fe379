"""Keys in files may be written like flags. Names that the user chose stay as they are."""

from pathlib import Path

import pytest

from trivet.config.load import LoadedConfig, SectionT, load_config
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.errors import ConfigError

VF = 'model = "m/n"\n[env]\nid = "e"\n[inference]\ngpus = 1\n[trainer]\ngpus = 1\n[trainer.args]\n'
GROUP = "[orchestrator]\nrollouts-per-example = 2\n"


def load(kind: type[SectionT], path: Path, text: str) -> LoadedConfig[SectionT]:
    path.write_text(text)
    return load_config(kind, ["@", str(path)], environ={})


def test_a_key_with_dashes_is_the_key_with_underscores_in_every_dialect(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    assert load(VfRLConfig, file, f"{VF}micro-batch-size = 4\n").config.trainer.args.micro_batch_size == 4
    assert load(RLConfig, file, f"max-steps = 3\n{GROUP}[trainer.loss]\nkl-tau = 0.5\n").config.max_steps == 3
    assert load(
        TrainerConfig, file, "[model.ac-offloading]\npin-memory = false\n[model.ac]\nfreq = 1\n"
    ).config.model.ac_offloading
    assert load(OrchestratorConfig, file, "batch-size = 8\nrollouts-per-example = 2\n").config.batch_size == 8
    assert load(InferenceConfig, file, "[model]\nmax-model-len = 64\n").config.model.max_model_len == 64
    assert load(SftConfig, file, "max-steps = 9\n").config.max_steps == 9
    assert load(EvalConfig, file, "num-examples = 5\n").config.num_examples == 5


def test_the_origin_of_a_key_with_dashes_stands_under_its_name_here(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    assert load(EvalConfig, file, "num-examples = 5\n").origins == {"num_examples": str(file)}


def test_keys_of_a_list_of_tables_may_have_dashes(tmp_path: Path) -> None:
    text = (
        f'{GROUP}[[orchestrator.env]]\nid = "a"\non-reward-error = "zero"\nargs = {{ max-len = 3, list = [{{ a-b = 1 }}] }}\n'
    )
    (env,) = load(RLConfig, tmp_path / "a.toml", text).config.orchestrator.env
    assert env.on_reward_error == "zero"
    assert env.args == {"max-len": 3, "list": [{"a-b": 1}]}


def test_names_of_the_users_own_keep_their_dashes(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    vf = load(VfRLConfig, file, f"{VF}[env.args]\nmax-len = 3\n[inference.args]\nenforce-eager = true\n")
    assert vf.config.env.args == {"max-len": 3}
    assert vf.config.inference.args == {"enforce-eager": True}
    inference = load(InferenceConfig, file, "[vllm-args]\nmax-log-len = 3\n")
    assert inference.config.vllm_args == {"max-log-len": 3}
    orchestrator = load(
        OrchestratorConfig,
        file,
        "rollouts-per-example = 2\n[client.headers]\nX-Team = 'a'\n[sampling.extra-body.chat-template-kwargs]\nuse-it = true\n",
    )
    assert orchestrator.config.client.headers == {"X-Team": "a"}
    assert orchestrator.config.sampling.extra_body == {"chat-template-kwargs": {"use-it": True}}


def test_an_older_name_may_have_dashes(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    loaded = load(OrchestratorConfig, file, 'group-size = 4\n[[environment]]\nid = "a"\nargs = { a-b = 1 }\n')
    assert loaded.config.rollouts_per_example == 4
    assert loaded.config.env[0].args == {"a-b": 1}
    served = load(InferenceConfig, file, "[vllm]\ntensor-parallel-size = 2\nmax-log-len = 3\n").config
    assert served.parallel.tp == 2
    assert served.vllm_args == {"max-log-len": 3}
    assert load(RLConfig, file, f"inference-gpus = 2\n{GROUP}").config.inference_gpu_ids == [0, 1]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max-steps = 3\nmax_steps = 3\n", "max-steps and max_steps"),
        ("[model.ac-offloading]\n[model.ac_offloading]\npin_memory = false\n", "model.ac-offloading and model.ac_offloading"),
    ],
)
def test_both_spellings_of_a_key_in_one_file_are_refused_with_both_names(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    with pytest.raises(ConfigError) as caught:
        load(TrainerConfig, file, text)
    assert f"{named} are two spellings of one key ({file}); remove one" in str(caught.value)


def test_both_spellings_inside_a_list_of_tables_are_refused_with_both_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.0\.on-reward-error and env\.0\.on_reward_error are two spellings of one key"):
        load(
            OrchestratorConfig,
            tmp_path / "a.toml",
            'rollouts_per_example = 2\n[[env]]\nid = "a"\non-reward-error = "fail"\non_reward_error = "fail"\n',
        )


def test_a_later_file_may_use_the_other_spelling(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("max-steps = 3\n")
    second.write_text('toml-files = ["a.toml"]\nmax_steps = 4\n')
    assert load_config(TrainerConfig, ["@", str(second)], environ={}).config.max_steps == 4


def test_both_spellings_of_the_files_to_inherit_from_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="toml-files and toml_files are two spellings of one key"):
        load(TrainerConfig, tmp_path / "a.toml", "toml-files = []\ntoml_files = []\n")
