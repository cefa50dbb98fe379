"""Checks over several keys accept what fits; checks of files refuse what is not here. Refusals are in tests/unit/messages.txt."""

from pathlib import Path

import pytest

from trivet.config.check_files import file_problems, looks_local
from trivet.config.load import load_config
from trivet.config.schema.environment import RequestSamplingConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig, InferenceModelConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig, SftDataConfig
from trivet.config.schema.trainer import TokenizerConfig, TrainerConfig, TrainerModelConfig
from trivet.errors import ConfigError
from trivet.wire.groups import biasing_fields

GROUPED = ("--orchestrator.rollouts-per-example", "2", "--max-steps", "10", "--max-model-len", "2048")
TWO_WIDE = ("--deployment.type", "multi_node", "--deployment.num-infer-nodes", "2")


def load(*argv: str) -> RLConfig:
    return load_config(RLConfig, [*GROUPED, *argv], environ={}).config


def notices(*argv: str) -> list[str]:
    return list(load_config(RLConfig, [*GROUPED, *argv], environ={}).notices)


@pytest.mark.parametrize(
    "words",
    [
        ("--trainer.scheduler.type", "linear"),
        ("--trainer.scheduler.type", "cosine"),
        ("--inference-gpu-ids", "0", "--trainer-gpu-ids", "0"),
        ("--trainer.metrics-server.port", "0"),
        ("--orchestrator.sampling.extra-body.stop", '["x"]'),
        ("--orchestrator.rollouts-per-example", "1", "--orchestrator.advantage.type", "none"),
        ("--trainer.tokenizer.name", "Qwen/Qwen3-0.6B"),
        ("--inference.vllm-args.max_num_batched_tokens", "64", "--inference.vllm-args.block_size", "16"),
    ],
)
def test_what_fits_together_is_accepted_without_a_word(words: tuple[str, ...]) -> None:
    assert notices(*words) == []


@pytest.mark.parametrize(
    "words",
    [
        "--scheduler.type cosine",  # it ends with the data
        '--data.subsets ["a","b"] --data.probabilities [0.25,0.75] --data.stopping-strategy all_exhausted',
        "--data.type fake --max-steps 3",
    ],
)
def test_data_and_schedules_of_fine_tuning_that_fit_are_accepted(words: str) -> None:
    assert load_config(SftConfig, words.split(), environ={}).notices == ()


@pytest.mark.parametrize(
    "words",
    [
        ("--inference.parallel.tp", "16"),
        ("--inference.parallel.tp", "8", "--inference.vllm-args.pipeline-parallel-size", "2"),
        ("--deployment.gpus-per-node", "0", "--inference.parallel.tp", "2"),
    ],
)
def test_a_server_may_span_two_nodes(words: tuple[str, ...]) -> None:
    assert load(*TWO_WIDE, *words).deployment.num_nodes == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
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
    assert f"{where}.extra_body.{field} (" in notice


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


@pytest.mark.parametrize("name", ["quantization", "hf_overrides", "kv_cache_dtype"])
def test_an_argument_of_the_engine_that_may_change_tokens_is_said(name: str) -> None:
    (notice,) = notices(f"--inference.vllm-args.{name}", "x")
    assert f"inference.vllm_args.{name} (" in notice


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_seqs", r"inference\.vllm_args\.max_num_seqs \(1\) .*set inference\.max_num_seqs instead"),
        ("kv_cache_memory_bytes", r"set inference\.cpu_kv_cache_gib instead"),
        ("override_generation_config", r"override_generation_config \(1\) is not allowed: vLLM would apply sampling defaults"),
        ("enable_scale_out", r"inference\.vllm_args\.enable_scale_out \(1\) is not allowed: /inference/v1/generate"),
        ("logprobs_mode", r"inference\.vllm_args\.logprobs_mode \(1\) is not allowed: .*remove it"),
        ("nnodes", r"inference\.vllm_args\.nnodes \(1\) is not allowed: set deployment\.num_infer_nodes to start"),
    ],
)
def test_an_argument_of_the_engine_that_a_key_or_the_server_sets_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        notices(f"--inference.vllm-args.{name}", "1")


NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.mark.parametrize(
    ("value", "others", "words"),
    [
        (NGRAM[:-1] + ', "rejection_sample_method": "synthetic"}', [], "rejection_sample_method"),
        (NGRAM, ["--inference.deterministic"], "inference.deterministic = true"),
        (NGRAM, ["--inference.return-routed-experts"], "inference.return_routed_experts = true"),
    ],
)
def test_drafts_that_would_change_what_is_sampled_are_refused(value: str, others: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load("--inference.vllm-args.speculative_config", value, *others)


def test_drafts_that_change_nothing_but_the_speed_are_not_said() -> None:
    assert notices("--inference.vllm-args.speculative-config", NGRAM) == []


def test_every_key_of_the_sampling_section_is_reproducible_or_off_by_default() -> None:
    section = RequestSamplingConfig()
    assert biasing_fields({name: getattr(section, name) for name in RequestSamplingConfig.model_fields}) == {}


def test_a_role_that_the_launcher_started_repeats_none_of_its_notices() -> None:
    argv = ["--rollouts-per-example", "2", "--sampling.top-p", "0.5"]
    assert len(load_config(OrchestratorConfig, argv, environ={}).notices) == 2
    assert load_config(OrchestratorConfig, [*argv, "--run.id", "r1"], environ={}).notices == ()


def test_a_measurement_of_the_trainer_asks_for_nothing_that_it_does_not_use() -> None:
    """It needs neither a group to compare rollouts in nor GPUs that servers could share."""
    loaded = load_config(RLConfig, ["--bench.output-json", "b.json"], environ={})
    assert loaded.config.trainer.bench is not None
    assert loaded.config.trainer.bench.output_json == Path("b.json")
    assert loaded.notices == ()
    assert not list(file_problems(SftConfig.model_validate({"bench": {}, "data": {"name": "nowhere.jsonl"}})))


def test_a_replay_starts_no_server_whatever_the_configuration_says_of_it() -> None:
    config = load("--orchestrator.replay", "r", "--inference.max-num-seqs", "4")
    assert config.inference is None
    assert config.orchestrator.environments == {}
    assert load("--orchestrator.replay", "None").inference is not None


def test_a_run_whose_server_sleeps_tells_orchestrator_and_trainer() -> None:
    config = load("--inference.sleep-while-training", "--max-async-level", "0")
    assert config.orchestrator.sleep_servers
    assert config.trainer.release_gpu_memory


def test_a_name_that_means_a_directory_must_be_one_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def problems(name: str) -> list[str]:
        return list(file_problems(TrainerConfig(model=TrainerModelConfig(name=name))))

    for name in ("./nope", "/nope", "~/nope", "outputs/sft/weights/step_3", "models/nope"):
        (problem,) = problems(name)
        assert problem.startswith(f"model.name ({name}) is not a directory")
    (problem,) = problems("models/smollm2")
    assert problem.endswith("is not a directory; it is made by uv run python -m trivet.examples.smollm2")
    assert problems("Qwen/Qwen3-0.6B") == problems("gpt2") == []
    (tmp_path / "org" / "model").mkdir(parents=True)
    (problem,) = problems("org/model")
    assert "has no config.json" in problem
    (tmp_path / "org" / "model" / "config.json").write_text("{}")
    assert problems("org/model") == []


def test_a_missing_model_of_a_run_is_said_once() -> None:
    assert len(list(file_problems(load("--model.name", "./nope")))) == 1


def test_missing_data_and_weights_are_said(tmp_path: Path) -> None:
    sft = SftConfig(data=SftDataConfig(name=str(tmp_path / "data.jsonl")))
    assert any("data.name" in problem for problem in file_problems(sft))
    (tmp_path / "data.jsonl").touch()
    assert list(file_problems(sft)) == []
    assert any("weights_dir" in problem for problem in file_problems(EvalConfig(weights_dir=tmp_path / "weights")))
    assert list(file_problems(EvalConfig(weights_dir=tmp_path))) == []
    assert len(list(file_problems(InferenceConfig(model=InferenceModelConfig(name="./nope"))))) == 1


def test_data_of_the_hub_are_not_looked_for_on_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "val.jsonl"
    file.touch()
    assert not looks_local("PrimeIntellect/Reverse-Text-SFT")
    assert all(looks_local(name) for name in ("data.jsonl", "./data", "/data", "a/b/c", str(tmp_path)))
    sft = SftConfig.model_validate({"data": {"name": "org/set"}, "val": {"data": {"name": str(file)}}})
    assert list(file_problems(sft)) == []
    sft = SftConfig.model_validate({"data": {"name": str(file), "subsets": ["a"]}, "val": {}})
    assert [problem.partition(" ")[0] for problem in file_problems(sft)] == ["data.subsets", "val.data.name"]


def test_a_chat_template_is_text_or_a_file_that_is_there(tmp_path: Path) -> None:
    def problems(template: str) -> list[str]:
        return list(file_problems(TrainerConfig(tokenizer=TokenizerConfig(chat_template=template))))

    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert problems(str(file)) == problems("{{ messages }}") == []
    (problem,) = problems(str(tmp_path / "none.jinja"))
    assert problem.startswith(f"tokenizer.chat_template ({tmp_path}/none.jinja) is neither a template nor a file")
