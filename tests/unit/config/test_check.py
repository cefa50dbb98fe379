"""Every check over several keys can fail. Its message has the arithmetic and what to change."""

import re
from pathlib import Path

import pytest

from trivet.config.check_files import file_problems
from trivet.config.load import load_config
from trivet.config.schema.environment import RequestSamplingConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig, InferenceModelConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig, SftDataConfig
from trivet.config.schema.trainer import TokenizerConfig, TrainerConfig, TrainerModelConfig
from trivet.errors import ConfigError
from trivet.wire.sampling_fields import biasing_fields

GROUPED = ("--orchestrator.rollouts-per-example", "2", "--max-steps", "10", "--max-model-len", "2048")


def refusal(kind: type, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(kind, argv, environ={})
    return str(caught.value)


def notices(*argv: str) -> list[str]:
    return list(load_config(RLConfig, [*GROUPED, *argv], environ={}).notices)


@pytest.mark.parametrize(
    ("batch", "group", "said"),
    [
        (100, 16, "batch_size (100) must be divisible by rollouts_per_example (16): 100 % 16 = 4; try 96 or 112"),
        (8, 16, "batch_size (8) must be divisible by rollouts_per_example (16): 8 % 16 = 8; try 16"),
    ],
)
def test_a_batch_that_does_not_divide_shows_the_arithmetic_and_what_would(batch: int, group: int, said: str) -> None:
    argv = ("--batch-size", str(batch), "--rollouts-per-example", str(group))
    assert refusal(OrchestratorConfig, *argv) == said


def test_messages_of_a_run_name_keys_as_the_run_has_them() -> None:
    argv = ("--orchestrator.batch-size", "100", "--orchestrator.rollouts-per-example", "16")
    said = (
        "orchestrator.batch_size (100) must be divisible by orchestrator.rollouts_per_example (16): 100 % 16 = 4; try 96 or 112"
    )
    assert refusal(RLConfig, *argv) == said


def test_fewer_rollouts_in_flight_than_a_group_has_are_refused() -> None:
    said = refusal(OrchestratorConfig, "--rollouts-per-example", "8", "--max-concurrent", "4")
    assert said.startswith("max_concurrent (4) must be >= rollouts_per_example (8)")


def test_a_lag_that_would_be_dropped_as_stale_is_refused() -> None:
    said = refusal(OrchestratorConfig, "--rollouts-per-example", "2", "--max-async-level", "9")
    assert said.startswith("max_async_level (9) must be <= max_off_policy_steps (8)")


def test_more_tokens_demanded_than_allowed_are_refused() -> None:
    said = refusal(EvalConfig, "--sampling.min-tokens", "9", "--sampling.max-tokens", "8")
    assert said == "sampling.min_tokens (9) must be <= sampling.max_tokens (8)"


def test_a_group_of_one_is_fine_without_a_baseline() -> None:
    assert load_config(OrchestratorConfig, ["--advantage.type", "none"], environ={}).config.rollouts_per_example == 1


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decaying_schedule_needs_an_end(schedule: str) -> None:
    argv = ("--trainer.scheduler.type", schedule)
    said = refusal(RLConfig, "--orchestrator.rollouts-per-example", "2", *argv)
    assert said == f'trainer.scheduler.type "{schedule}" decays until the last step: set max_steps'
    load_config(RLConfig, [*GROUPED, *argv], environ={})
    # Its end is that of the data.
    load_config(SftConfig, ["--scheduler.type", schedule, "--scheduler.min-lr", "0"], environ={})


def test_a_schedule_that_ends_above_its_peak_is_refused() -> None:
    argv = ("--scheduler.type", "cosine", "--scheduler.min-lr", "1", "--max-steps", "5")
    assert "scheduler.min_lr (1.0) must be <= optim.lr (1e-06)" in refusal(TrainerConfig, *argv)


def test_loss_bounds_that_leave_no_token_are_refused() -> None:
    assert "loss.token_mask_low (9.0) must be < loss.token_mask_high (8.0)" in refusal(
        TrainerConfig, "--loss.token-mask-low", "9"
    )


def test_the_trainers_rows_must_hold_the_orchestrators() -> None:
    said = refusal(RLConfig, *GROUPED, "--orchestrator.seq-len", "4096")
    assert said.startswith("trainer.model.seq_len (2048) must be >= orchestrator.seq_len (4096)")


def test_both_orders_of_seq_len_and_max_model_len_are_accepted_and_said_once() -> None:
    assert notices("--seq-len", "512", "--max-model-len", "512") == []
    (longer,) = notices("--seq-len", "512", "--max-model-len", "1024")
    assert "the first 512 are trained on" in longer
    (shorter,) = notices("--seq-len", "1024", "--max-model-len", "512")
    assert "ends a completion when it and its prompt reach 512 tokens" in shorter


def test_completions_that_leave_no_room_for_a_prompt_are_refused() -> None:
    argv = ("--orchestrator.sampling.max-tokens", "512", "--max-model-len", "512", "--seq-len", "512")
    assert "must be < inference.model.max_model_len (512)" in refusal(RLConfig, *GROUPED, *argv)


def test_what_an_evaluated_environment_samples_differently_is_checked_too() -> None:
    said = refusal(EvalConfig, "--env.0.sampling.min-tokens", "9", "--sampling.max-tokens", "8")
    assert said == "env.0.sampling.min_tokens (9) must be <= env.0.sampling.max_tokens (8)"
    said = refusal(EvalConfig, "--env.0.sampling.temp-scheduler.end-temperature", "0.5")
    assert said.startswith("env.0.sampling.temp_scheduler changes with the step")


def test_sampling_that_the_trainer_cannot_reproduce_is_said_once_with_its_keys() -> None:
    (notice,) = notices("--orchestrator.sampling.top-p", "0.9", "--orchestrator.sampling.min-p", "0.1")
    assert "orchestrator.sampling.top_p (0.9), orchestrator.sampling.min_p (0.1)" in notice
    assert "importance ratio is biased" in notice
    assert notices("--orchestrator.sampling.temperature", "0.7", "--orchestrator.sampling.top-k", "0") == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", '{"5": 3}'),
        ("bad_words", '["no"]'),
        ("allowed_token_ids", "[1, 2]"),
        ("structured_outputs", '{"choice": ["a", "b"]}'),
        ("response_format", '{"type": "json_object"}'),
        ("tool_choice", "required"),
        ("thinking_token_budget", "9"),
        ("n", "2"),
        ("a_field_of_the_next_release", "1"),
    ],
)
@pytest.mark.parametrize("where", ["orchestrator.sampling", "orchestrator.env.0.sampling"])
def test_a_field_that_is_not_known_to_be_reproducible_is_said(where: str, field: str, value: str) -> None:
    (notice,) = notices(f"--{where}.extra-body.{field}", value)
    assert f"cannot reproduce {where}.extra_body.{field} (" in notice


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", "{}"),
        ("bad_words", "[]"),
        ("stop", '["x"]'),
        ("ignore_eos", "true"),
        ("tool_choice", "auto"),
        ("response_format", '{"type": "text"}'),
        ("chat_template_kwargs", '{"enable_thinking": false}'),
        ("n", "1"),
    ],
)
def test_a_field_that_is_off_or_changes_no_probability_is_not_said(field: str, value: str) -> None:
    assert notices(f"--orchestrator.sampling.extra-body.{field}", value) == []


def test_a_value_that_is_long_is_cut_in_a_notice() -> None:
    (notice,) = notices("--orchestrator.sampling.extra-body.allowed_token_ids", str(list(range(1000))))
    assert "(" + str(list(range(1000)))[:60] + "...)" in notice


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits_processors", '["my.module:Processor"]'),
        ("quantization", "fp8"),
        ("hf_overrides", '{"rope_theta": 5}'),
        ("kv_cache_dtype", "fp8"),
        ("speculative_config", '{"method": "ngram"}'),
    ],
)
def test_an_argument_of_the_engine_that_may_change_tokens_is_said(name: str, value: str) -> None:
    (notice,) = notices(f"--inference.vllm-args.{name}", value)
    assert f"inference.vllm_args.{name} (" in notice
    assert "the importance ratio is biased" in notice


def test_an_argument_of_the_engine_for_memory_and_speed_is_not_said() -> None:
    assert notices("--inference.vllm-args.max_num_batched_tokens", "64", "--inference.vllm-args.block_size", "16") == []


def test_every_key_of_the_sampling_section_is_reproducible_or_off_by_default() -> None:
    section = RequestSamplingConfig()
    assert biasing_fields({name: getattr(section, name) for name in RequestSamplingConfig.model_fields}) == {}


def test_a_knob_in_extra_body_too_is_refused_with_both_places() -> None:
    said = refusal(OrchestratorConfig, "--rollouts-per-example", "2", "--sampling.extra-body.top-p", "0.5")
    assert said.startswith("sampling.extra_body.top_p (0.5) and sampling.top_p (1.0) are the same knob")
    said = refusal(EvalConfig, "--sampling.extra-body.max-completion-tokens", "5")
    assert "sampling.max_tokens" in said
    load_config(OrchestratorConfig, ["--rollouts-per-example", "2", "--sampling.extra-body.stop", '["x"]'], environ={})


def test_an_engine_argument_that_has_a_key_is_refused() -> None:
    said = refusal(InferenceConfig, "--vllm-args.tensor-parallel-size", "2")
    assert said == "vllm_args.tensor_parallel_size (2) has a key of its own: set parallel.tp instead"


def test_environments_need_different_names() -> None:
    environments = '[{"id": "a"}, {"id": "b"}, {"id": "a"}]'
    said = refusal(EvalConfig, "--env", environments)
    assert said.startswith('env.0 and env.2 are both called "a"')
    load_config(EvalConfig, ["--env", environments, "--env.2.name", "again"], environ={})


def test_gpu_lists_must_fit() -> None:
    assert "inference_gpu_ids must name at least one GPU and each once, got [0, 0]" in refusal(
        RLConfig, *GROUPED, "--inference-gpu-ids", "0,0"
    )
    said = refusal(RLConfig, *GROUPED, "--inference-gpu-ids", "0,1,2", "--inference.parallel.tp", "2")
    assert said.endswith("must be divisible by inference.parallel.tp (2): 3 % 2 = 1; change either")
    load_config(RLConfig, [*GROUPED, "--inference-gpu-ids", "0", "--trainer-gpu-ids", "0"], environ={})


def test_a_run_without_an_end_says_so_once() -> None:
    loaded = load_config(RLConfig, [*GROUPED[:2], *GROUPED[4:]], environ={})
    assert loaded.notices == ("max_steps is not set: the run goes on until it is stopped",)


def test_a_role_that_the_launcher_started_repeats_none_of_its_notices() -> None:
    argv = ["--rollouts-per-example", "2", "--sampling.top-p", "0.5"]
    assert len(load_config(OrchestratorConfig, argv, environ={}).notices) == 2
    assert load_config(OrchestratorConfig, [*argv, "--run.id", "r1"], environ={}).notices == ()


def test_samples_that_nothing_but_the_model_bounds_are_said_to_be_cut() -> None:
    (said,) = load_config(RLConfig, GROUPED[:-2], environ={}).notices
    assert "max_model_len is the model's own limit: of longer samples the first orchestrator.seq_len (2048)" in said


def test_a_different_tokenizer_is_said() -> None:
    (notice,) = notices("--trainer.tokenizer.name", "org/other")
    assert notice.startswith("trainer.tokenizer.name (org/other)")
    assert notices("--trainer.tokenizer.name", "Qwen/Qwen3-0.6B") == []


def test_a_name_that_means_a_directory_must_be_one_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def problems(name: str) -> list[str]:
        config = TrainerConfig(model=TrainerModelConfig(name=name))
        return list(file_problems(config))

    for name in ("./nope", "/nope", "~/nope", "outputs/sft/weights/step_3", "models/nope"):
        (problem,) = problems(name)
        assert problem.startswith(f"model.name ({name}) is not a directory")
    (problem,) = problems("models/smollm2")
    assert problem.endswith("is not a directory; it is made by uv run python -m trivet.examples.smollm2")
    assert problems("Qwen/Qwen3-0.6B") == []
    assert problems("gpt2") == []
    (tmp_path / "org" / "model").mkdir(parents=True)
    (problem,) = problems("org/model")
    assert "has no config.json" in problem
    (tmp_path / "org" / "model" / "config.json").write_text("{}")
    assert problems("org/model") == []


def test_a_missing_model_of_a_run_is_said_once() -> None:
    config = load_config(RLConfig, [*GROUPED, "--model.name", "./nope"], environ={}).config
    assert len(list(file_problems(config))) == 1


def test_missing_data_and_weights_are_said(tmp_path: Path) -> None:
    sft = SftConfig(data=SftDataConfig(name=str(tmp_path / "data.jsonl")))
    assert any("data.name" in problem for problem in file_problems(sft))
    (tmp_path / "data.jsonl").touch()
    assert list(file_problems(sft)) == []
    assert any("weights_dir" in problem for problem in file_problems(EvalConfig(weights_dir=tmp_path / "weights")))
    assert list(file_problems(EvalConfig(weights_dir=tmp_path))) == []
    assert len(list(file_problems(InferenceConfig(model=InferenceModelConfig(name="./nope"))))) == 1


def test_two_servers_of_a_run_cannot_listen_on_one_port() -> None:
    argv = (*GROUPED, "--trainer.metrics-server.port")
    assert refusal(RLConfig, *argv, "8000").startswith("trainer.metrics_server.port (8000) is inference.server.port too")
    assert refusal(RLConfig, *argv, "5555").startswith(
        "trainer.metrics_server.port (5555) is trainer.rollout_transport.port too"
    )
    load_config(RLConfig, [*argv, "0"], environ={})


def test_a_measurement_of_the_trainer_asks_for_nothing_that_it_does_not_use() -> None:
    """It needs neither a group to compare rollouts in nor GPUs that servers could share."""
    config = load_config(RLConfig, ["--bench.output-json", "b.json", "--trainer.optim.lr", "1e-5"], environ={}).config
    assert config.trainer.bench is not None
    assert config.trainer.bench.output_json == Path("b.json")
    assert load_config(RLConfig, ["--bench"], environ={}).notices == ()
    assert not list(file_problems(SftConfig.model_validate({"bench": {}, "data": {"name": "nowhere.jsonl"}})))


def test_made_up_batches_are_for_the_trainer_alone() -> None:
    assert "give it to `uv run trainer` as data.fake" in refusal(RLConfig, *GROUPED, "--trainer.data.fake")
    assert "two sources of batches" in refusal(TrainerConfig, "--data.fake", "--data.replay", "elsewhere")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--orchestrator.eval.env.id", "a"],
            "orchestrator.eval needs an inference server, and orchestrator.replay (r) starts none",
        ),
        (["--orchestrator.val"], "orchestrator.val needs an inference server"),
        (["--orchestrator.client.elastic.hostname", "h"], 'set orchestrator.client.elastic = "None"'),
        (["--orchestrator.teacher-model.model.name", "m"], "orchestrator.teacher_model needs an inference server"),
        (["--trainer.loss.teacher-tau", "0.1"], "trainer.loss.teacher_tau is above 0 and needs a teacher's server"),
        (["--ckpt.resume-from", "run"], "goes on with the groups of that run"),
    ],
)
def test_a_replay_refuses_what_needs_a_server(words: list[str], said: str) -> None:
    assert said in refusal(RLConfig, *GROUPED, "--orchestrator.replay", "r", *words)


def test_a_replay_starts_no_server_whatever_the_configuration_says_of_it() -> None:
    loaded = load_config(RLConfig, [*GROUPED, "--orchestrator.replay", "r", "--inference.max-num-seqs", "4"], environ={})
    assert loaded.config.inference is None
    assert loaded.config.orchestrator.environments == {}
    assert load_config(RLConfig, [*GROUPED, "--orchestrator.replay", "None"], environ={}).config.inference is not None


def test_a_trace_needs_the_steps_that_it_is_of() -> None:
    said = refusal(TrainerConfig, "--trace-path", "traces", "--max-steps", "2")
    assert said == "trace_path traces the third and fourth step, and max_steps is 2; raise it"


def test_a_made_up_sample_must_fit_into_a_row() -> None:
    words = ("--model.seq-len", "64", "--bench.prompt-len", "60", "--bench.answer-len", "8")
    assert refusal(TrainerConfig, *words) == (
        "bench.prompt_len (60) and an answer of 8 tokens must fit into model.seq_len (64); shorten them"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weights-dir", "w", "--steps", "0,2"], r"steps must name steps >= 1, got \[0, 2\]"),
        (["--env.id", "a", "--resume-path", "r", "--output-dir", "o"], r"resume_path \(r\) .* and output_dir \(o\) too"),
        (["--env.id", "a", "--retry.wait-max", "0.5"], r"retry\.wait_min \(1\.0\) must be <= retry\.wait_max \(0\.5\)"),
        (["--env.id", "a", "--client.endpoint", "e", "--client.base-url", "http://x"], r"endpoint \('e'\) and base_url"),
        (["--env.id", "a", "--save.hf.dataset-name", "d"], r"save\.hf\.dataset_name .* does not exist here: results stay"),
        (
            ["--env.id", "a", "--per-rollout"],
            "per_rollout .* does not exist here: the rollouts of an example are scored together",
        ),
    ],
)
def test_what_eval_cannot_evaluate_is_refused(words: list[str], message: str) -> None:
    assert re.search(message, refusal(EvalConfig, *words))


def test_keys_of_eval_that_say_what_is_so_anyway_are_accepted_with_a_notice() -> None:
    words = [
        "--env.id",
        "a",
        "--save.stream",
        "true",
        "--save.disk.path",
        "o",
        "--reasoning-field",
        "r",
        "--per-rollout",
        "false",
    ]
    loaded = load_config(EvalConfig, words, environ={})
    assert loaded.config.output_dir == Path("o")
    assert len(loaded.notices) == 4


def test_a_chat_template_is_text_or_a_file_that_is_there(tmp_path: Path) -> None:
    def problems(template: str) -> list[str]:
        config = TrainerConfig(tokenizer=TokenizerConfig(chat_template=template))
        return list(file_problems(config))

    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert problems(str(file)) == problems("{{ messages }}") == []
    (problem,) = problems(str(tmp_path / "none.jinja"))
    assert problem.startswith(f"tokenizer.chat_template ({tmp_path}/none.jinja) is neither a template nor a file")


TWO_WIDE = ("--deployment.type", "multi_node", "--deployment.num-infer-nodes", "2")


@pytest.mark.parametrize(
    "words",
    [
        ("--inference.parallel.tp", "16"),
        ("--inference.parallel.tp", "8", "--inference.vllm-args.pipeline-parallel-size", "2"),
        ("--deployment.gpus-per-node", "0", "--inference.parallel.tp", "2"),
    ],
)
def test_a_server_may_span_two_nodes(words: tuple[str, ...]) -> None:
    config = load_config(RLConfig, [*GROUPED, *TWO_WIDE, *words], environ={}).config
    assert config.deployment.num_nodes == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--deployment.num-train-nodes", "2"], r'num_train_nodes need type = "multi_node"'),
        (
            ["--deployment.type", "multi_node", "--deployment.num-infer-nodes", "2"],
            r"inference.parallel.tp \(1\) must be the GPUs of the server, .* = 2 \* 8 = 16; change it, or start a server on each",
        ),
        (
            [*TWO_WIDE, "--deployment.gpus-per-node", "0", "--inference.parallel.tp", "3"],
            r"inference.parallel.tp \(3\) must be divisible by deployment.num_infer_nodes \(2\), for each node has as many ranks",
        ),
        (
            [*TWO_WIDE, "--inference.parallel.tp", "16", "--inference.parallel.dp", "2"],
            r"inference.parallel.dp \(2\) must be 1 for a server over several nodes",
        ),
        (
            [*TWO_WIDE, "--inference.parallel.tp", "4", "--inference.vllm-args.pipeline-parallel-size", "2"],
            r"inference.parallel.tp \* pipeline_parallel_size \(8\) must be the GPUs of the server",
        ),
        (["--deployment.type", "multi_node", "--deployment.num-infer-nodes", "0"], r"must be 0 if the run starts no server"),
        (["--deployment.type", "multi_node", "--inference", "None"], r"num_infer_nodes \(1\) must be 0 if the run starts no"),
        (
            ["--deployment.type", "multi_node", "--teacher-gpu-ids", "[0]", "--orchestrator.teacher-model.model.name", "big"],
            "has no place for a teacher.s server",
        ),
        (
            ["--deployment.type", "multi_node", "--deployment.gpus-per-node", "4", "--trainer.model.dp-replicate", "3"],
            r"the ranks of all nodes \(4\)",
        ),
        (
            ["--deployment.type", "multi_node", "--inference.parallel.tp", "3"],
            r"deployment.gpus_per_node / servers_per_node names 8 GPU\(s\), which must be divisible by inference.parallel.tp \(3\)",
        ),
        (["--deployment.type", "multi_node", "--deployment.servers-per-node", "3"], r"must divide gpus_per_node \(8\)"),
        (["--deployment.type", "multi_node", "--deployment.min-train-nodes", "2"], "must be <= num_train_nodes"),
    ],
)
def test_nodes_that_cannot_be_are_refused(words: list[str], said: str) -> None:
    assert re.search(said, refusal(RLConfig, *GROUPED, *words))
