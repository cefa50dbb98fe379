"""Plain transformers loads what is exported."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.tiny_models import make_mixture_config
from trivet.config.schema.model import LoRAConfig, RopeScalingConfig
from trivet.config.schema.trainer import TokenizerConfig, TrainerModelConfig, TrainingConfig
from trivet.errors import ConfigError
from trivet.trainer.device_copies import HostCopies
from trivet.trainer.model import export as export_module
from trivet.trainer.model.export import Exporter, load_tokenizer
from trivet.trainer.model.policy_model import load_policy
from trivet.trainer.ranks.world import gather_tensor
from trivet.trainer.rows import to_tensors
from trivet.trainer.step import Learner


def make_exporter(learner: Learner, directory: Path, dtype: torch.dtype) -> Exporter:
    config = TrainingConfig(model=TrainerModelConfig(name=str(directory)))
    return Exporter(model=learner.model, tokenizer=load_tokenizer(config), dtype=dtype)


def export(exporter: Exporter, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    exporter.write(directory, exporter.gather(keep=True))
    return directory


def test_the_balance_of_experts_is_published_in_its_own_dtype_although_it_is_no_parameter(
    tiny_model: Path, make_learner, tmp_path: Path
) -> None:
    hf_config = make_mixture_config()
    AutoModelForCausalLM.from_config(hf_config).save_pretrained(tmp_path / "start")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "start")
    learner = make_learner(tmp_path / "start")
    balance = torch.tensor([0.5, -1.0, 2.0, 1 / 3])  # a third has more bits than bfloat16
    [name] = [name for name, _ in learner.model.causal_lm.named_buffers() if name.endswith("e_score_correction_bias")]
    learner.model.causal_lm.get_buffer(name).copy_(balance)
    directory = export(make_exporter(learner, tmp_path / "start", torch.bfloat16), tmp_path / "published")
    with safe_open(directory / "model.safetensors", "pt") as weights:
        assert torch.equal(weights.get_tensor(name), balance)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(directory, dtype="auto").get_buffer(name).float(), balance)


def test_the_saved_dtype_is_in_the_files_and_in_the_config(any_model: Path, make_learner, tmp_path: Path) -> None:
    export(make_exporter(make_learner(any_model), any_model, torch.bfloat16), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert "trivet" not in (tmp_path / "config.json").read_text()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118  # not a mapping
        assert ("lm_head.weight" in file.keys()) == ("untied" in any_model.name)  # noqa: SIM118


class LateCopies(HostCopies):
    """Copies nothing before it is waited for, as a GPU may."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.started: list[tuple[torch.Tensor, torch.Tensor]] = []

    def start(self, target: torch.Tensor, source: torch.Tensor, *, does_change: bool) -> None:
        self.started.append((target, source))

    def wait(self) -> None:
        while self.started:
            target, source = self.started.pop()
            target.copy_(source)


def test_writing_waits_for_the_copies_and_gathering_does_not(tiny_model: Path, make_learner, tmp_path: Path) -> None:
    exporter = make_exporter(make_learner(tiny_model), tiny_model, torch.float32)
    exporter.copies = copies = LateCopies()
    weights = exporter.gather(keep=True)
    assert len(copies.started) == len(weights)
    exporter.write(tmp_path, weights)
    assert copies.started == []
    with safe_open(tmp_path / "model.safetensors", "pt") as file, safe_open(tiny_model / "model.safetensors", "pt") as start:
        for name in start.keys():  # noqa: SIM118  # not a mapping
            assert torch.equal(file.get_tensor(name), start.get_tensor(name))


def test_shards_are_converted_before_they_are_gathered(tiny_model: Path, make_learner, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[torch.dtype] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        gathered.append(tensor.dtype)
        return gather_tensor(tensor)

    monkeypatch.setattr(export_module, "gather_tensor", record)
    model = make_learner(tiny_model, lora=LoRAConfig()).model
    weights = export_module.gather_weights(model, dtype=torch.bfloat16, keep=True, only_trained=True)
    assert set(gathered) == {torch.bfloat16}
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_the_same_weights_give_the_same_names_as_the_model_they_came_from(any_model: Path, make_learner) -> None:
    learner = make_learner(any_model)
    weights = make_exporter(learner, any_model, torch.float32).gather(keep=True)
    with safe_open(any_model / "model.safetensors", "pt") as file:
        assert set(weights) == set(file.keys())
        assert all(torch.equal(weights[name], file.get_tensor(name)) for name in weights)


def test_export_is_flat_and_carries_tokenizer_and_generation_config(tiny_model: Path, make_learner, tmp_path: Path) -> None:
    exporter = make_exporter(make_learner(tiny_model), tiny_model, torch.float32)
    assert exporter.gather(keep=False) == {}, "other ranks take part and keep nothing"
    export(exporter, tmp_path)
    assert all(path.is_file() for path in tmp_path.iterdir())
    assert (tmp_path / "generation_config.json").exists()
    message = [{"role": "user", "content": "abc"}]
    theirs, ours = (AutoTokenizer.from_pretrained(path) for path in (tiny_model, tmp_path))
    assert ours.apply_chat_template(message, tokenize=False) == theirs.apply_chat_template(message, tokenize=False)
    several = make_exporter(make_learner(tiny_model), tiny_model, torch.float32)
    several.tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    directory = export(several, tmp_path / "several")
    assert all(path.is_file() for path in directory.iterdir())
    assert AutoTokenizer.from_pretrained(directory).chat_template == several.tokenizer.chat_template


def test_the_copies_of_a_step_are_made_in_the_memory_of_the_last(any_model: Path, make_learner, tmp_path: Path) -> None:
    learner = make_learner(any_model)
    exporter = make_exporter(learner, any_model, torch.float32)
    first = exporter.gather(keep=True)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    assert not {*places.values()} & {tensor.data_ptr() for tensor in learner.model.parameters()}
    exporter.write(tmp_path, first)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(1)
    second = exporter.gather(keep=True)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    assert torch.equal(second["model.norm.weight"], learner.model.get_parameter("causal_lm.model.norm.weight"))


def test_a_model_directory_that_does_not_exist_is_named(world, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        load_policy(TrainerModelConfig(name=str(tmp_path / "nothing")), world)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_policy(TrainerModelConfig(name=str(tmp_path)), world)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_chat_template_of_the_configuration_is_used_and_saved(
    tiny_model: Path, make_learner, tmp_path: Path, as_file: bool
) -> None:
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    named = TokenizerConfig(chat_template=str(tmp_path / "chat.jinja") if as_file else template)
    tokenizer = load_tokenizer(TrainingConfig(model=TrainerModelConfig(name=str(tiny_model)), tokenizer=named))
    exporter = Exporter(model=make_learner(tiny_model).model, tokenizer=tokenizer, dtype=torch.float32)
    saved = AutoTokenizer.from_pretrained(export(exporter, tmp_path / "weights"))
    for each in (tokenizer, saved):
        assert each.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<a>"


def test_stretched_positions_are_trained_with_and_saved(tiny_model: Path, oracle, world, tmp_path: Path) -> None:
    scaling = RopeScalingConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    config = TrainerModelConfig(name=str(tiny_model), rope_scaling=scaling, compute_dtype="float32")
    model = load_policy(config, world)
    tokenizer = load_tokenizer(TrainingConfig(model=config))
    plain = AutoModelForCausalLM.from_pretrained(
        export(Exporter(model=model, tokenizer=tokenizer, dtype=torch.float32), tmp_path / "weights")
    )
    assert plain.config.rope_parameters["rope_type"] == "yarn"
    assert plain.config.rope_parameters["factor"] == 4.0
    (example,) = oracle.make_examples(count=1, vocab_size=100)
    row = to_tensors(oracle.make_row([example]), device=torch.device("cpu"))
    unscaled = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        ours = model(row).logprobs_N
        theirs, others = (
            torch.log_softmax(each(input_ids=row.token_ids_1U).logits[0] / example.temperature, dim=-1)[
                row.predictors_N, row.targets_N
            ]
            for each in (plain, unscaled)
        )
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(ours, others, atol=1e-4)
