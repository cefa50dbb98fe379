from pathlib import Path

import pytest

from trivet.config.keys import find_key
from trivet.config.load import LoadedConfig, load_config
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.model import ActivationCheckpointConfig, CompileConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.config.spellings import GPU_COUNTS, IGNORED, REFUSED, RENAMED, SINGLE_VALUES
from trivet.errors import ConfigError

QUIET = ["--orchestrator.rollouts-per-example", "2", "--max-steps", "10", "--max-model-len", "2048"]


def load(*argv: str) -> LoadedConfig[RLConfig]:
    return load_config(RLConfig, [*QUIET, *argv], environ={})


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return str(caught.value)


def path_of(key: str) -> tuple[str, ...]:
    return tuple(key.split("."))


@pytest.mark.parametrize("today", sorted(set(RENAMED.values())))
def test_every_renamed_key_leads_to_one_that_exists(today: str) -> None:
    path = path_of(today)
    command = {"eval": EvalConfig, "vf": VfRLConfig}.get(path[0])
    assert find_key(command, path[1:]) if command else find_key(RLConfig, path)


@pytest.mark.parametrize("old", [*RENAMED, *REFUSED, *IGNORED, *SINGLE_VALUES, *GPU_COUNTS])
def test_no_key_that_exists_is_in_the_tables(old: str) -> None:
    assert find_key(RLConfig, path_of(old)) is None


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


def test_the_environments_of_2026_are_a_list_here(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[[orchestrator.train.env]]\nid = "a"\n[[orchestrator.train.env]]\nid = "b"\n')
    assert [env.id for env in load("@", str(file)).config.orchestrator.env] == ["a", "b"]


def test_engine_arguments_find_their_keys() -> None:
    argv = ["--vllm.max-model-len", "512", "--vllm.tensor-parallel-size", "2", "--vllm.swap-space", "4"]
    config = load_config(InferenceConfig, argv, environ={}).config
    assert (config.model.max_model_len, config.parallel.tp, config.vllm_args) == (512, 2, {"swap_space": 4})


def test_a_server_given_as_text_is_a_list_of_one() -> None:
    loaded = load("--orchestrator.model.client.base-url", "http://127.0.0.1:8000/v1")
    assert loaded.config.orchestrator.client.base_url == ["http://127.0.0.1:8000/v1"]


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


def test_activation_checkpointing_as_text_shows_the_table() -> None:
    said = refusal("--trainer.model.ac", "full")
    assert 'trainer.model.ac is a table, not "full": write [trainer.model.ac] and below it freq = 1' in said
    assert "not available" not in said
    assert 'mode = "selective"' in refusal("--trainer.model.ac", "selective")


def test_a_table_of_a_lever_is_turned_on_by_true() -> None:
    config = load("--trainer.model.compile", "true", "--trainer.model.ac").config.trainer.model
    assert (config.compile, config.ac) == (CompileConfig(), ActivationCheckpointConfig())
    assert load("--trainer.model.compile", "false").config.trainer.model.compile is None


@pytest.mark.parametrize("key", ["ep", "cp", "tp"])
def test_a_way_of_spreading_a_model_that_does_not_exist_is_refused_unless_it_is_off(key: str) -> None:
    assert f"trainer.model.{key}: 1 is the only choice here" in load(f"--trainer.model.{key}", "1").notices[0].replace(
        " (flag --trainer.model." + key + ")", ""
    )
    text = refusal(f"--trainer.model.{key}", "2")
    assert f"trainer.model.{key} (flag --trainer.model.{key}) does not exist here" in text
    assert ("set trainer.model.ac" if key == "cp" else "use more ranks, or trainer.model.fsdp_cpu_offload") in text


def test_one_graph_for_a_block_is_refused_before_anything_starts() -> None:
    text = refusal("--trainer.model.compile.fullgraph", "true")
    assert "trainer.model.compile" in text
    assert "fullgraph = true cannot be used: most attentions loop over the samples of each row" in text
    assert load("--trainer.model.compile.fullgraph", "false").config.trainer.model.compile == CompileConfig()


def test_keys_of_prime_rl_that_mean_nothing_here_are_said_and_what_cannot_be_is_refused() -> None:
    loaded = load(
        "--log.file", "false", "--trainer.model.impl", "hf", "--orchestrator.client.skip-model-check", "--wandb.id", "x"
    )
    assert [line.partition(" (")[0] for line in loaded.notices] == [
        "log.file",
        "trainer.model.impl",
        "orchestrator.client.skip_model_check",
        "wandb.id",
    ]
    assert "safetensors in weights/" in refusal("--weight-broadcast.type", "nccl")
    extra_body = load("--orchestrator.sampling.reasoning-effort", "low").config.orchestrator.sampling.extra_body
    assert extra_body == {"reasoning_effort": "low"}


def test_a_choice_without_alternative_changes_nothing() -> None:
    loaded = load("--weight-broadcast.type", "filesystem", "--orchestrator.mask-env-responses", "true")
    assert len(loaded.notices) == 2
    assert "filesystem is the only choice here" in loaded.notices[0]
    assert "weight_broadcast.type (flag --weight-broadcast.type) does not exist here" in refusal(
        "--weight-broadcast.type", "nccl"
    )


def test_what_was_replaced_is_refused_with_its_replacement() -> None:
    assert "set ckpt.resume_step" in refusal("--resume")
    assert load("--resume.step", "5").config.trainer.ckpt.resume_step == 5
    assert "[[orchestrator.env]]" in refusal("--orchestrator.train.source", "[]")
    assert "the policy did not sample it" in refusal("--orchestrator.mask-env-responses", "false")
    assert "scripts/bench" in refusal("--orchestrator.bench")


@pytest.mark.parametrize(("text", "is_on"), [("true", True), ("false", False)])
def test_a_benchmark_may_be_switched_on_as_a_boolean(tmp_path: Path, text: str, is_on: bool) -> None:
    file = tmp_path / "t.toml"
    file.write_text(f"bench = {text}\n")
    assert (load_config(TrainerConfig, ["@", str(file)], environ={}).config.bench is not None) is is_on
    assert (load("@", str(file)).config.trainer.bench is not None) is is_on


def test_a_key_without_meaning_here_is_said_and_left_out() -> None:
    (notice,) = load("--trainer.ckpt.weights.save-adapter-separately", "true").notices
    assert "has no effect: with LoRA the adapter's own files are" in notice


def test_advantage_none_means_raw_rewards(tmp_path: Path) -> None:
    assert load("--orchestrator.advantage", "None").config.orchestrator.advantage.type == "none"
    file = tmp_path / "o.toml"
    file.write_text('advantage = "None"\n')
    assert load_config(OrchestratorConfig, ["@", str(file)], environ={}).config.advantage.type == "none"


@pytest.mark.parametrize("attn", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_names_of_attention_that_the_reference_has_are_names_here(attn: str) -> None:
    loaded = load("--trainer.model.attn", attn)
    assert loaded.config.trainer.model.attn == attn
    assert not loaded.notices


def test_an_evaluations_client_may_name_further_request_fields(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text("[client.extra_body]\nmin-width = 3\n[client.extra_body.chat_template_kwargs]\nenable_thinking = false\n")
    loaded = load_config(EvalConfig, ["@", str(file)], environ={})
    assert loaded.config.sampling.extra_body == {"min-width": 3, "chat_template_kwargs": {"enable_thinking": False}}
    assert f"client.extra_body.min-width is called sampling.extra_body.min-width here ({file})" in loaded.notices


def test_a_request_field_that_both_sections_of_an_evaluation_set_differently_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text("[client]\nextra_body = { width = 3 }\n[sampling]\nextra_body = { width = 4 }\n")
    with pytest.raises(ConfigError, match=r"client\.extra_body\.width \(3\) and sampling\.extra_body\.width \(4\)"):
        load_config(EvalConfig, ["@", str(file)], environ={})


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


@pytest.mark.parametrize("prefix", ["", "trainer.", "orchestrator."])
def test_batches_as_files_are_refused_with_what_keeps_and_reads_them(prefix: str) -> None:
    key = f"--{prefix}rollout-transport.type"
    assert "is the only choice here" in load(key, "zmq").notices[0]
    assert "set trainer.data.record = true; `uv run trainer` trains on such files again with data.replay" in refusal(
        key, "filesystem"
    )


def test_the_transport_of_a_run_may_be_set_once_for_both_ends() -> None:
    config = load("--rollout-transport.port", "5600").config
    assert config.trainer.rollout_transport.port == config.orchestrator.rollout_transport.port == 5600


def test_weights_in_the_format_of_torch_are_refused_with_a_remedy() -> None:
    said = refusal("--ckpt.weights.save-format", "torch")
    assert "runs code when it is loaded" in said
    assert "torch.save its state_dict()" in said


@pytest.mark.parametrize("old", sorted(REFUSED))
def test_every_refusal_says_what_to_do_instead(old: str) -> None:
    words = ("set ", "remove ", "lower ", "change ", "start ", "upload ", "use ", "[[orchestrator.env]]", "uv run ")
    assert any(word in REFUSED[old] for word in words), REFUSED[old]
