from pathlib import Path

import pytest

from trivet.config.keys import find_key
from trivet.config.load import LoadedConfig, SectionT, load_config
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.model import ActivationCheckpointConfig, CompileConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.config.spellings import GPU_COUNTS, IGNORED, REFUSED, RENAMED, SINGLE_VALUES
from trivet.errors import ConfigError

VF = 'model = "m/n"\n[env]\nid = "e"\n[inference]\ngpus = 1\n[trainer]\ngpus = 1\n[trainer.args]\n'
GROUP = "[orchestrator]\nrollouts-per-example = 2\n"
QUIET = ["--orchestrator.rollouts-per-example", "2", "--max-steps", "10", "--max-model-len", "2048"]


def load(*argv: str) -> LoadedConfig[RLConfig]:
    return load_config(RLConfig, [*QUIET, *argv], environ={})


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return str(caught.value)


def path_of(key: str) -> tuple[str, ...]:
    return tuple(key.split("."))


def test_every_renamed_key_leads_to_one_that_exists_and_no_other_key_of_the_tables_does() -> None:
    for today in RENAMED.values():
        path = path_of(today)
        command = {"eval": EvalConfig, "vf": VfRLConfig}.get(path[0])
        assert find_key(command, path[1:]) if command else find_key(RLConfig, path), today
    for old in (*RENAMED, *REFUSED, *IGNORED, *SINGLE_VALUES, *GPU_COUNTS):
        assert find_key(RLConfig, path_of(old)) is None, old


def test_a_renamed_key_is_accepted_with_one_line() -> None:
    loaded = load("--orchestrator.train.sampling.max-completion-tokens", "64")
    assert loaded.config.orchestrator.sampling.max_tokens == 64
    assert loaded.notices == (
        "orchestrator.train.sampling.max_completion_tokens is called orchestrator.sampling.max_tokens here"
        " (flag --orchestrator.train.sampling.max-completion-tokens)",
    )


def test_a_role_alone_takes_old_spellings_without_its_prefix() -> None:
    loaded = load_config(OrchestratorConfig, ["--group-size", "8"], environ={})
    assert loaded.config.rollouts_per_example == 8
    assert "group_size is called rollouts_per_example here (flag --group-size)" in loaded.notices


def test_the_environment_table_of_2025_is_the_only_environment(tmp_path: Path) -> None:
    file = tmp_path / "o.toml"
    file.write_text('rollouts_per_example = 2\n[environment]\nid = "my-env"\n[environment.args]\nsplit = "train"\n')
    (env,) = load_config(OrchestratorConfig, ["@", str(file)], environ={}).config.env
    assert (env.id, env.args) == ("my-env", {"split": "train"})
    (env,) = load("--orchestrator", "@", str(file)).config.orchestrator.env
    assert (env.id, env.args) == ("my-env", {"split": "train"})


def test_gpu_counts_give_inference_the_first_ids() -> None:
    config = load("--trainer-gpus", "2", "--inference-gpus", "6").config
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ([0, 1, 2, 3, 4, 5], [6, 7])
    config = load("--deployment.num-train-gpus", "2").config
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ([0], [1, 2])
    assert "must be a number of GPUs >= 1, got 'two'" in refusal("--trainer-gpus", "two")


def test_gpu_counts_of_a_flag_win_over_ids_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("trainer_gpu_ids = [7]\n")
    assert load("@", str(file), "--trainer-gpus", "1", "--inference-gpus", "2").config.trainer_gpu_ids == [2]


def test_a_table_of_a_lever_is_turned_on_by_true() -> None:
    config = load("--trainer.model.compile", "true", "--trainer.model.ac").config.trainer.model
    assert (config.compile, config.ac) == (CompileConfig(), ActivationCheckpointConfig())
    assert load("--trainer.model.compile", "false").config.trainer.model.compile is None


@pytest.mark.parametrize(("text", "is_on"), [("true", True), ("false", False)])
def test_a_benchmark_may_be_switched_on_as_a_boolean(tmp_path: Path, text: str, is_on: bool) -> None:
    file = tmp_path / "t.toml"
    file.write_text(f"bench = {text}\n")
    assert (load_config(TrainerConfig, ["@", str(file)], environ={}).config.bench is not None) is is_on
    assert (load("@", str(file)).config.trainer.bench is not None) is is_on


def test_advantage_none_means_raw_rewards(tmp_path: Path) -> None:
    assert load("--orchestrator.advantage", "None").config.orchestrator.advantage.type == "none"
    file = tmp_path / "o.toml"
    file.write_text('advantage = "None"\n')
    assert load_config(OrchestratorConfig, ["@", str(file)], environ={}).config.advantage.type == "none"


def test_an_evaluations_client_may_name_further_request_fields(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text("[client.extra_body]\nmin-width = 3\n[client.extra_body.chat_template_kwargs]\nenable_thinking = false\n")
    loaded = load_config(EvalConfig, ["@", str(file)], environ={})
    assert loaded.config.sampling.extra_body == {"min-width": 3, "chat_template_kwargs": {"enable_thinking": False}}
    assert f"client.extra_body.min-width is called sampling.extra_body.min-width here ({file})" in loaded.notices


def test_run_name_may_stand_directly_under_trainer_in_files_of_vf_rl(tmp_path: Path) -> None:
    file = tmp_path / "vf.toml"
    text = 'model = "m/n"\n[env]\nid = "e"\n[inference]\ngpus = 1\n[trainer]\ngpus = 1\nrun_name = "mine"\n'
    file.write_text(text)
    loaded = load_config(VfRLConfig, ["@", str(file)], environ={})
    assert loaded.config.trainer.args.run_name == "mine"
    assert loaded.notices == (f"trainer.run_name is called trainer.args.run_name here ({file})",)
    file.write_text(f'{text}[trainer.args]\nrun_name = "other"\n')
    with pytest.raises(ConfigError, match=r"trainer\.run_name \('mine'\) and trainer\.args\.run_name \('other'\)"):
        load_config(VfRLConfig, ["@", str(file)], environ={})


def test_every_refusal_says_what_to_do_instead() -> None:
    words = ("set ", "remove ", "lower ", "change ", "start ", "upload ", "use ", "[[orchestrator.env]]", "uv run ")
    assert [text for text in REFUSED.values() if not any(word in text for word in words)] == []


def load_file(kind: type[SectionT], path: Path, text: str) -> LoadedConfig[SectionT]:
    path.write_text(text)
    return load_config(kind, ["@", str(path)], environ={})


def test_a_key_with_dashes_is_the_key_with_underscores_in_every_dialect(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    assert load_file(VfRLConfig, file, f"{VF}micro-batch-size = 4\n").config.trainer.args.micro_batch_size == 4
    assert load_file(RLConfig, file, f"max-steps = 3\n{GROUP}[trainer.loss]\nkl-tau = 0.5\n").config.max_steps == 3
    assert load_file(
        TrainerConfig, file, "[model.ac-offloading]\npin-memory = false\n[model.ac]\nfreq = 1\n"
    ).config.model.ac_offloading
    assert load_file(OrchestratorConfig, file, "batch-size = 8\nrollouts-per-example = 2\n").config.batch_size == 8
    assert load_file(InferenceConfig, file, "[model]\nmax-model-len = 64\n").config.model.max_model_len == 64
    assert load_file(SftConfig, file, "max-steps = 9\n").config.max_steps == 9
    loaded = load_file(EvalConfig, file, "num-examples = 5\n")
    assert (loaded.config.num_examples, loaded.origins) == (5, {"num_examples": str(file)})


def test_keys_of_a_list_of_tables_may_have_dashes(tmp_path: Path) -> None:
    text = (
        f'{GROUP}[[orchestrator.env]]\nid = "a"\non-reward-error = "zero"\nargs = {{ max-len = 3, list = [{{ a-b = 1 }}] }}\n'
    )
    (env,) = load_file(RLConfig, tmp_path / "a.toml", text).config.orchestrator.env
    assert env.on_reward_error == "zero"
    assert env.args == {"max-len": 3, "list": [{"a-b": 1}]}


def test_names_of_the_users_own_keep_their_dashes(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    vf = load_file(VfRLConfig, file, f"{VF}[env.args]\nmax-len = 3\n[inference.args]\nenforce-eager = true\n")
    assert vf.config.env.args == {"max-len": 3}
    assert vf.config.inference.args == {"enforce-eager": True}
    inference = load_file(InferenceConfig, file, "[vllm-args]\nmax-log-len = 3\n")
    assert inference.config.vllm_args == {"max-log-len": 3}
    orchestrator = load_file(
        OrchestratorConfig,
        file,
        "rollouts-per-example = 2\n[client.headers]\nX-Team = 'a'\n[sampling.extra-body.chat-template-kwargs]\nuse-it = true\n",
    )
    assert orchestrator.config.client.headers == {"X-Team": "a"}
    assert orchestrator.config.sampling.extra_body == {"chat-template-kwargs": {"use-it": True}}


def test_an_older_name_may_have_dashes(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    loaded = load_file(OrchestratorConfig, file, 'group-size = 4\n[[environment]]\nid = "a"\nargs = { a-b = 1 }\n')
    assert loaded.config.rollouts_per_example == 4
    assert loaded.config.env[0].args == {"a-b": 1}
    served = load_file(InferenceConfig, file, "[vllm]\ntensor-parallel-size = 2\nmax-log-len = 3\n").config
    assert served.parallel.tp == 2
    assert served.vllm_args == {"max-log-len": 3}
    assert load_file(RLConfig, file, f"inference-gpus = 2\n{GROUP}").config.inference_gpu_ids == [0, 1]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max-steps = 3\nmax_steps = 3\n", "max-steps and max_steps"),
        ("[model.ac-offloading]\n[model.ac_offloading]\npin_memory = false\n", "model.ac-offloading and model.ac_offloading"),
        ("toml-files = []\ntoml_files = []\n", "toml-files and toml_files"),
        (
            '[[env]]\nid = "a"\non-reward-error = "fail"\non_reward_error = "fail"\n',
            "env.0.on-reward-error and env.0.on_reward_error",
        ),
    ],
)
def test_both_spellings_of_a_key_in_one_file_are_refused_with_both_names(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    with pytest.raises(ConfigError) as caught:
        load_file(OrchestratorConfig if "env" in text else TrainerConfig, file, text)
    assert f"{named} are two spellings of one key ({file}); remove one" in str(caught.value)


def test_a_later_file_may_use_the_other_spelling(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("max-steps = 3\n")
    second.write_text('toml-files = ["a.toml"]\nmax_steps = 4\n')
    assert load_config(TrainerConfig, ["@", str(second)], environ={}).config.max_steps == 4
