from pathlib import Path

import pytest

from trivet.config.dump import to_toml
from trivet.config.keys import value_at
from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.errors import ConfigError

GROUPED = ("--orchestrator.rollouts-per-example", "2")


def resolved(*argv: str) -> RLConfig:
    return load_config(RLConfig, [*GROUPED, *argv], environ={}).config


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(*argv)
    return str(caught.value)


def at(config: RLConfig, key: str) -> object:
    return value_at(config, tuple(key.split(".")))


MODEL_NAMES = ("model.name", "trainer.model.name", "orchestrator.model.name", "inference.model.name")
AGREEING = [
    (MODEL_NAMES, "org/model", "org/model"),
    (("max_steps", "trainer.max_steps", "orchestrator.max_steps"), "7", 7),
    (("max_async_level", "trainer.max_async_level", "orchestrator.max_async_level"), "3", 3),
    (("output_dir", "trainer.output_dir", "orchestrator.output_dir", "inference.output_dir"), "somewhere", Path("somewhere")),
    (("ckpt.interval", "trainer.ckpt.interval", "orchestrator.ckpt.interval"), "5", 5),
    (("ckpt.resume_step", "trainer.ckpt.resume_step", "orchestrator.ckpt.resume_step"), "-1", -1),
    (("ckpt.keep_last", "trainer.ckpt.keep_last", "orchestrator.ckpt.keep_last"), "2", 2),
    (("ckpt.keep_interval", "trainer.ckpt.keep_interval", "orchestrator.ckpt.keep_interval"), "10", 10),
    (("ckpt.weights.interval", "trainer.ckpt.weights.interval", "orchestrator.ckpt.weights.interval"), "10", 10),
    (("trainer.rollout_transport.port", "orchestrator.rollout_transport.port"), "6000", 6000),
    (("trainer.run.id", "orchestrator.run.id", "inference.run.id"), "abc", "abc"),
]


@pytest.mark.parametrize(("keys", "text", "value"), AGREEING, ids=lambda case: case[0] if isinstance(case, tuple) else None)
def test_a_value_that_must_agree_can_be_given_at_any_role(keys: tuple[str, ...], text: str, value: object) -> None:
    for given in keys:
        config = resolved(f"--{given}", text)
        assert [at(config, key) for key in keys] == [value] * len(keys)


@pytest.mark.parametrize(("keys", "text", "value"), AGREEING, ids=lambda case: case[0] if isinstance(case, tuple) else None)
def test_two_values_where_roles_must_agree_are_refused_with_both(keys: tuple[str, ...], text: str, value: object) -> None:
    said = refusal(f"--{keys[0]}", text, f"--{keys[1]}", "99")
    assert f"{keys[0]} ({text}, flag --{keys[0]}) and {keys[1]} (99, flag --{keys[1]}) must be equal" in said
    resolved(f"--{keys[0]}", text, f"--{keys[1]}", text)


@pytest.mark.parametrize(
    ("shared", "roles", "text", "value", "other"),
    [
        ("seq_len", ("trainer.model.seq_len", "orchestrator.seq_len"), "512", 512, 1024),
        ("max_model_len", ("inference.model.max_model_len",), "512", 512, 1024),
        ("seed", ("trainer.seed", "orchestrator.seed", "inference.seed"), "7", 7, 8),
        ("log.level", ("trainer.log.level", "orchestrator.log.level", "inference.log.level"), "debug", "debug", "error"),
        ("wandb.project", ("trainer.wandb.project", "orchestrator.wandb.project"), "p", "p", "q"),
    ],
)
def test_a_shared_value_fills_roles_that_have_none_of_their_own(
    shared: str, roles: tuple[str, ...], text: str, value: object, other: object
) -> None:
    config = resolved(f"--{shared}", text)
    assert [at(config, role) for role in roles] == [value] * len(roles)
    config = resolved(f"--{shared}", text, f"--{roles[0]}", str(other))
    assert [at(config, role) for role in roles] == [other] + [value] * (len(roles) - 1)


def test_wandb_without_keys_is_on_for_both_roles_and_one_may_leave() -> None:
    config = resolved("--wandb")
    assert config.trainer.wandb is not None
    assert config.orchestrator.wandb is not None
    config = resolved("--wandb.project", "p", "--trainer.wandb", "None")
    assert config.trainer.wandb is None
    assert config.orchestrator.wandb is not None


def test_a_waiting_time_of_one_end_is_taken_for_the_other_unless_it_has_its_own() -> None:
    config = resolved("--orchestrator.rollout-transport.timeout-s", "5")
    assert config.trainer.rollout_transport.timeout_s == 5
    config = resolved("--orchestrator.rollout-transport.timeout-s", "5", "--trainer.rollout-transport.timeout-s", "6")
    assert config.trainer.rollout_transport.timeout_s == 6


def test_the_client_follows_our_server() -> None:
    assert resolved().orchestrator.client.base_url == ["http://127.0.0.1:8000/v1"]
    assert resolved("--inference.server.port", "9000").orchestrator.client.base_url == ["http://127.0.0.1:9000/v1"]
    everywhere = resolved("--inference.server.host", "0.0.0.0")
    assert everywhere.orchestrator.client.base_url == ["http://127.0.0.1:8000/v1"]


def test_a_client_that_asks_another_server_than_ours_is_refused_unless_ours_is_off() -> None:
    url = "http://elsewhere:8000/v1"
    assert "is not the server of this run" in refusal("--orchestrator.client.base-url", url)
    assert "is not the server of this run" in refusal("--orchestrator.client.base-url", "http://localhost:9999/v1")
    assert "hidden" not in refusal("--orchestrator.client.base-url", "http://me:hidden@elsewhere:8000/v1")
    resolved("--orchestrator.client.base-url", "http://localhost:8000/v1")
    config = resolved("--orchestrator.client.base-url", url, "--inference", "None")
    assert config.inference is None
    assert config.orchestrator.client.base_url == [url]


def test_someone_elses_server_may_name_the_model_otherwise() -> None:
    config = resolved("--inference", "None", "--model.name", "org/a", "--orchestrator.model.name", "org/b")
    assert (config.trainer.model.name, config.orchestrator.model.name) == ("org/a", "org/b")


def test_someone_elses_server_is_asked_for_the_trained_model_unless_another_name_is_given() -> None:
    config = resolved("--inference", "None", "--model.name", "org/a")
    assert config.orchestrator.model.name == config.trainer.model.name == "org/a"


def test_trainer_and_server_take_the_dtype_that_one_of_them_names() -> None:
    def dtypes(*argv: str) -> tuple[str, str]:
        run = resolved(*argv)
        assert run.inference is not None
        return run.trainer.model.compute_dtype, run.inference.model.dtype

    assert dtypes() == ("auto", "auto")
    assert dtypes("--trainer.model.compute-dtype", "float32") == ("float32", "float32")
    assert dtypes("--trainer.model.compute-dtype", "float32", "--inference.model.dtype", "auto") == ("float32", "float32")
    assert dtypes("--inference.model.dtype", "bfloat16") == ("bfloat16", "bfloat16")
    assert dtypes("--inference.model.dtype", "float16") == ("auto", "float16")
    assert dtypes("--trainer.model.compute-dtype", "float32", "--inference.model.dtype", "bfloat16") == ("float32", "bfloat16")


def test_a_wrong_shared_value_is_reported_once_at_the_key_that_was_typed() -> None:
    assert refusal("--seq-len", "-4") == 'seq_len must be >= 2, got "-4" (flag --seq-len)'


def test_a_derived_value_says_what_it_was_taken_from(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("max_steps = 5\n[orchestrator]\nrollouts_per_example = 2\n")
    origins = load_config(RLConfig, ["@", str(file)], environ={}).origins
    assert origins["max_steps"] == str(file)
    assert origins["trainer.max_steps"] == f"max_steps, {file}"
    assert origins["orchestrator.client.base_url"] == "inference.server, default"


def test_resolving_a_resolved_run_changes_nothing(tmp_path: Path) -> None:
    config = resolved("--max-steps", "5", "--wandb.project", "p", "--ckpt.interval", "2", "--seq-len", "512")
    file = tmp_path / "rl.toml"
    file.write_text(to_toml(config))
    assert load_config(RLConfig, ["@", str(file)], environ={}).config == config


DETERMINISTIC = {
    "trainer.deterministic": True,
    "orchestrator.deterministic": True,
    "orchestrator.strict_async_level": True,
    "orchestrator.oversampling_factor": 1.0,
    "inference.deterministic": True,
    "inference.max_num_seqs": 1,
}


def test_a_deterministic_run_derives_what_it_needs_in_every_role() -> None:
    config = resolved("--deterministic", "true", "--seed", "7")
    assert {key: at(config, key) for key in DETERMINISTIC} == DETERMINISTIC
    assert config.orchestrator.sampling.seed == 7
    assert resolved("--deterministic", "true", "--orchestrator.sampling.seed", "3").orchestrator.sampling.seed == 3
    plain = resolved()
    assert not any((plain.trainer.deterministic, plain.orchestrator.deterministic, plain.orchestrator.strict_async_level))


def test_a_deterministic_run_may_use_someone_elses_server() -> None:
    config = resolved("--deterministic", "true", "--inference", "None")
    assert config.inference is None
    assert config.orchestrator.strict_async_level


def test_trainer_and_server_write_conversations_with_one_template() -> None:
    for key in ("trainer.tokenizer.chat-template", "inference.model.chat-template", "inference.vllm.chat-template"):
        config = resolved(f"--{key}", "{{ messages }}")
        assert config.inference is not None
        assert config.inference.model.chat_template == config.trainer.tokenizer.chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"trainer\.tokenizer\.chat_template .* must be equal"):
        resolved("--trainer.tokenizer.chat-template", "{a}", "--inference.model.chat-template", "{b}")


@pytest.mark.parametrize("side", ["trainer.model", "inference.model"])
def test_trainer_and_server_have_the_same_positions(side: str) -> None:
    flags = (f"--{side}.rope-scaling.type", "yarn", f"--{side}.rope-scaling.factor", "4")
    config = resolved(*flags, f"--{side}.rope-scaling.original-max-position-embeddings", "1024")
    assert config.inference is not None
    assert config.inference.model.rope_scaling == config.trainer.model.rope_scaling
    assert config.trainer.model.rope_scaling is not None
    assert config.trainer.model.rope_scaling.factor == 4.0
    assert 'rope_type "yarn" needs original_max_position_embeddings' in refusal(*flags)
    assert "must be equal" in refusal(
        *flags, "--trainer.model.rope-scaling.factor", "4", "--inference.model.rope-scaling.factor", "2"
    )
