from pathlib import Path

import pytest

from trivet.config.keys import nearest_key
from trivet.config.load import LoadedConfig, load_config
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import LinearSchedule, TrainerConfig
from trivet.errors import ConfigError


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def load_trainer(*argv: str, **environ: str) -> LoadedConfig[TrainerConfig]:
    return load_config(TrainerConfig, argv, environ=environ)


def refusal(kind: type, *argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(kind, argv, environ=environ)
    return str(caught.value)


def test_nothing_given_is_all_defaults() -> None:
    loaded = load_trainer()
    assert loaded.config == TrainerConfig()
    assert loaded.origins == {}
    assert loaded.notices == ()


def test_the_variable_of_the_secret_is_no_key() -> None:
    assert load_trainer(TRIVET_SECRET_FILE="/run/secret", TRIVET_MAX_STEPS="7").config.max_steps == 7


def test_flags_win_over_files_over_the_environment_over_defaults(tmp_path: Path) -> None:
    first = write(tmp_path / "a.toml", "seed = 1\n[optim]\nlr = 1.0\nweight_decay = 1.0\nmax_norm = 1.5\n")
    second = write(tmp_path / "b.toml", "[optim]\nlr = 2.0\nweight_decay = 2.0\n")
    loaded = load_trainer(
        "@", first, "@", second, "--optim.lr", "3", TRIVET_OPTIM__EPS="0.5", TRIVET_OPTIM__MAX_NORM="9", TRIVET_OPTIM__LR="9"
    )
    optim = loaded.config.optim
    assert (optim.lr, optim.weight_decay, optim.max_norm, optim.eps, optim.betas1) == (3.0, 2.0, 1.5, 0.5, 0.9)
    assert loaded.origins == {
        "seed": first,
        "optim.lr": "flag --optim.lr",
        "optim.weight_decay": second,
        "optim.max_norm": first,
        "optim.eps": "variable TRIVET_OPTIM__EPS",
    }


def test_files_may_stand_after_flags_and_still_lose(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "seed = 1\n")
    assert load_trainer("--seed=2", "@", file).config.seed == 2


def test_a_file_inherits_relative_to_itself_and_wins_over_its_bases(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    write(tmp_path / "shared" / "base.toml", "seed = 1\nmax_steps = 10\n")
    write(tmp_path / "shared" / "middle.toml", 'toml_files = ["base.toml"]\nmax_steps = 20\n')
    top = write(tmp_path / "top.toml", 'toml_files = ["shared/middle.toml"]\n[optim]\nlr = 0.5\n')
    config = load_trainer("@", top).config
    assert (config.seed, config.max_steps, config.optim.lr) == (1, 20, 0.5)


def test_a_file_to_inherit_from_that_is_missing_is_told_with_who_names_it(tmp_path: Path) -> None:
    copy = write(tmp_path / "copy.toml", 'toml_files = ["../examples/cpu.toml"]\n')
    assert f"(toml_files of {copy} names it, counted from that file's folder)" in refusal(TrainerConfig, "@", copy)


def test_a_file_that_inherits_from_itself_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", 'toml_files = ["b.toml"]\n')
    write(tmp_path / "b.toml", 'toml_files = ["a.toml"]\n')
    assert "inherits from itself" in refusal(TrainerConfig, "@", str(tmp_path / "a.toml"))


def test_two_files_may_share_a_base(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", "seed = 1\n")
    write(tmp_path / "b.toml", 'toml_files = ["base.toml"]\n')
    write(tmp_path / "c.toml", 'toml_files = ["base.toml"]\n')
    top = write(tmp_path / "a.toml", 'toml_files = ["b.toml", "c.toml"]\n')
    assert load_trainer("@", top).config.seed == 1


def test_the_text_none_is_null_everywhere(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", '[optim]\nmax_norm = "None"\n')
    assert load_trainer("@", file).config.optim.max_norm is None
    assert load_trainer("--optim.max-norm", "None").config.optim.max_norm is None
    assert load_trainer(TRIVET_OPTIM__MAX_NORM="None").config.optim.max_norm is None


def test_a_section_given_as_null_can_be_given_again_by_a_flag(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", 'wandb = "None"\n')
    assert load_trainer("@", file).config.wandb is None
    wandb = load_trainer("@", file, "--wandb.project", "p").config.wandb
    assert wandb is not None
    assert wandb.project == "p"


def test_a_section_given_again_above_a_null_has_the_keys_below_it(tmp_path: Path) -> None:
    base = write(tmp_path / "base.toml", "[wandb]\nproject = 'p'\n")
    off = write(tmp_path / "off.toml", "wandb = 'None'\n")
    assert load_config(TrainerConfig, ["@", base, "@", off], environ={}).config.wandb is None
    wandb = load_config(TrainerConfig, ["@", base, "@", off, "--wandb.offline"], environ={}).config.wandb
    assert wandb is not None
    assert (wandb.project, wandb.offline) == ("p", True)


def test_booleans_are_flags_without_a_value(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "[orchestrator]\nrollouts_per_example = 2\n")
    assert load_config(RLConfig, ["--clean", "@", file], environ={}).config.clean is True
    assert load_config(RLConfig, ["@", file, "--no-clean"], environ={}).config.clean is False
    assert load_config(RLConfig, ["@", file, "--clean", "true"], environ={}).config.clean is True
    assert load_config(EvalConfig, ["--no-eval-base"], environ={}).config.eval_base is False
    model = load_trainer("--no-model.reshard-after-forward").config.model
    assert model.reshard_after_forward is False


def test_a_bare_section_flag_turns_it_on_and_no_turns_it_off() -> None:
    assert load_trainer("--wandb").config.wandb is not None
    assert load_trainer("--no-wandb").config.wandb is None


def test_lists_are_comma_separated_or_json() -> None:
    for text in ("10,50,100", "[10, 50, 100]"):
        assert load_config(EvalConfig, ["--steps", text], environ={}).config.steps == [10, 50, 100]
    url = "http://127.0.0.1:8007/v1"
    assert load_config(EvalConfig, ["--client.base-url", url], environ={}).config.client.base_url == [url]


def test_a_single_text_is_a_list_of_one_in_a_file_too(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", '[client]\nbase_url = "http://127.0.0.1:1/v1"\n')
    assert load_config(EvalConfig, ["@", file], environ={}).config.client.base_url == ["http://127.0.0.1:1/v1"]


def test_a_key_of_the_only_environment_needs_no_index(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", '[[env]]\nid = "first"\nargs = { level = 1, kept = 2 }\n')
    (env,) = load_config(EvalConfig, ["@", file, "--env.id", "mine", "--env.args.level", "7"], environ={}).config.env
    assert (env.id, env.args) == ("mine", {"level": 7, "kept": 2})
    (env,) = load_config(EvalConfig, ["--env.id", "mine", "--env.name", "n"], environ={}).config.env
    assert (env.id, env.label) == ("mine", "n")


def test_a_key_of_one_of_several_environments_needs_an_index(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", '[[env]]\nid = "a"\n[[env]]\nid = "b"\n')
    assert "env has 2 entries; say which, e.g. env.0.id" in refusal(EvalConfig, "@", file, "--env.id", "x")
    loaded = load_config(EvalConfig, ["@", file, "--env.1.id", "x", "--env.2.id", "y"], environ={})
    assert [env.id for env in loaded.config.env] == ["a", "x", "y"]
    assert loaded.origins["env.0.id"] == file
    assert loaded.origins["env.1.id"] == "flag --env.1.id"
    assert "the next index is 2" in refusal(EvalConfig, "@", file, "--env.3.id", "x")
    assert "the next index is 0" in refusal(OrchestratorConfig, "--env", "[]", "--env.1.id", "x")


def test_the_first_flag_of_a_list_when_it_comes_again_begins_the_next_entry(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", '[[env]]\nid = "a"\nname = "first"\n[[env]]\nid = "b"\n')
    envs = load_config(EvalConfig, ["@", file, "--env.id", "x", "--env.id", "y"], environ={}).config.env
    assert [(env.id, env.name) for env in envs] == [("x", "first"), ("y", None)]
    words = ["--env.id", "a", "--env.name", "one", "--env.args.x", "1", "--env.id", "b", "--env.args.x", "2", "--env.id", "c"]
    envs = load_config(EvalConfig, words, environ={}).config.env
    assert [(env.id, env.name, env.args) for env in envs] == [("a", "one", {"x": 1}), ("b", None, {"x": 2}), ("c", None, {})]
    envs = load_config(EvalConfig, ["--env.id", "a", "--env.args.x", "1", "--env.args.x", "2"], environ={}).config.env
    assert [(env.id, env.args) for env in envs] == [("a", {"x": 2})]


def test_environments_can_be_given_as_json() -> None:
    loaded = load_config(EvalConfig, ["--env", '[{"id": "a"}, {"id": "b", "args": {"x": 1}}]'], environ={})
    assert [(env.id, env.args) for env in loaded.config.env] == [("a", {}), ("b", {"x": 1})]
    assert "must be JSON on a command line" in refusal(EvalConfig, "--env", "a")


def test_a_later_list_of_environments_replaces_the_earlier(tmp_path: Path) -> None:
    first = write(tmp_path / "a.toml", '[[env]]\nid = "a"\n[[env]]\nid = "b"\n')
    second = write(tmp_path / "b.toml", '[[env]]\nid = "c"\n')
    assert [env.id for env in load_config(EvalConfig, ["@", first, "@", second], environ={}).config.env] == ["c"]


def test_names_of_the_users_choice_are_not_checked() -> None:
    config = load_config(InferenceConfig, ["--vllm-args.swap-space", "4", "--vllm-args.mode", "fast"], environ={}).config
    assert config.vllm_args == {"swap_space": 4, "mode": "fast"}


def test_a_value_may_be_negative_or_hold_an_equals_sign() -> None:
    assert load_trainer("--ckpt.resume-step", "-1").config.ckpt.resume_step == -1
    assert load_trainer("--model.name=a=b").config.model.name == "a=b"


def test_a_section_with_a_type_takes_the_keys_of_that_type() -> None:
    argv = ("--scheduler.type", "linear", "--scheduler.warmup-steps", "3", "--max-steps", "9")
    assert load_trainer(*argv).config.scheduler == LinearSchedule(warmup_steps=3)


def test_an_unknown_key_of_a_file_names_where_it_stands_and_the_nearest_known(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "optimizer.lr = 3\n")
    assert refusal(TrainerConfig, "@", file) == f"unknown key optimizer ({file}); did you mean optim?"


def test_a_name_that_many_sections_have_is_guessed_only_from_a_place_like_the_one_typed() -> None:
    assert nearest_key(RLConfig, ("inference", "zzz", "port")) == "inference.server.port"
    assert nearest_key(RLConfig, ("somewhere_else_altogether", "name")) is None


def test_an_unknown_key_inside_a_list_is_found(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", '[[env]]\nid = "a"\n[[env]]\nnmae = "b"\n')
    assert "unknown key env.1.nmae" in refusal(EvalConfig, "@", file)


def test_a_variable_of_no_command_is_refused_and_one_of_another_command_is_not() -> None:
    assert "variable TRIVET_OPTIN__LR" in refusal(TrainerConfig, TRIVET_OPTIN__LR="1")
    assert load_trainer(TRIVET_TRAINER__OPTIM__LR="1", PATH="/bin").config == TrainerConfig()


def test_a_scalar_where_a_section_stands_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "optim = 3\n")
    assert refusal(TrainerConfig, "@", file) == f"optim must be a table of keys, got 3 ({file})"


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.toml", "a = = 1\n")
    text = refusal(TrainerConfig, "@", broken, "@", str(tmp_path / "absent.toml"), "--optim.lr", "x", "--foo", "1", "b.toml")
    assert text.startswith("5 problems in the configuration:\n- ")
    assert 'unexpected argument "b.toml": files follow @, flags start with --; write @ b.toml' in text
    assert f"{broken} is not valid TOML" in text
    assert "line 1" in text
    assert f"{tmp_path / 'absent.toml'} cannot be read: No such file or directory" in text
    assert "unknown key foo" in text
    assert "optim.lr must be a number" in text


def test_flags_and_files_left_without_their_value_are_refused() -> None:
    assert refusal(TrainerConfig, "--optim.lr") == "flag --optim.lr needs a value"
    assert refusal(TrainerConfig, "--optim.lr", "--seed", "1") == "flag --optim.lr needs a value"
    assert refusal(TrainerConfig, "@") == "@ must be followed by a TOML file"


def test_inheriting_from_something_else_than_names_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", 'toml_files = "base.toml"\n')
    assert "must be a list of file names" in refusal(TrainerConfig, "@", file)


def test_a_role_can_be_read_from_a_file_of_its_own(tmp_path: Path) -> None:
    trainer = write(tmp_path / "t.toml", "[optim]\nlr = 0.5\n")
    orchestrator = write(tmp_path / "o.toml", "batch_size = 32\nrollouts_per_example = 8\n")
    argv = ["--trainer", "@", trainer, "--orchestrator", "@", orchestrator, "--trainer.seed", "3"]
    loaded = load_config(RLConfig, argv, environ={})
    assert loaded.config.trainer.optim.lr == 0.5
    assert loaded.config.trainer.seed == 3
    assert loaded.config.orchestrator.batch_size == 32
    assert loaded.origins["trainer.optim.lr"] == trainer


@pytest.mark.parametrize("kind", [TrainerConfig, InferenceConfig, SftConfig, EvalConfig])
def test_the_defaults_of_every_command_but_the_orchestrators_are_whole(kind: type) -> None:
    assert load_config(kind, [], environ={}).config == kind()
