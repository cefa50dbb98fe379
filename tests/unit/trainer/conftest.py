"""Fixtures for tiny models with a tokenizer, a world of one rank, a learner, batches for it, and the oracle."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support.prepared_batches import make_batch
from support.scripts import load_module
from trivet.checkpoints.commit import ORCHESTRATOR, begin_part, finish_part
from trivet.config.layout import RunLayout
from trivet.config.schema.losses import DefaultLossConfig
from trivet.config.schema.model import LoRAConfig
from trivet.config.schema.trainer import AdamWConfig, ConstantSchedule, TrainerModelConfig
from trivet.examples.tiny_model import make_model, make_tokenizer
from trivet.trainer.losses.formulas import cross_entropy, make_policy_loss
from trivet.trainer.model.policy_model import load_policy
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.ranks.world import World, open_world
from trivet.trainer.rows import to_tensors
from trivet.trainer.step import Learner
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.events import Event
from trivet.wire.versions import Step

MakeLearner = Callable[..., Learner]


class FakeTelemetry:
    """Telemetry that keeps what it is given to write."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.steps: list[tuple[int, Mapping[str, float]]] = []

    def write_event(self, event: Event) -> None:
        self.events.append(event)

    def write_step(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append((step, values))

    def sync_events(self) -> None:
        """Keep every event at once."""


@pytest.fixture
def telemetry() -> FakeTelemetry:
    return FakeTelemetry()


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    return load_module(Path(__file__).with_name("oracle.py"))


@pytest.fixture(scope="session", params=["tied", "untied"])
def any_model(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Path:
    return tiny_models[request.param]


@pytest.fixture(scope="session")
def tiny_model(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["tied"]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {}
    tokenizer = make_tokenizer()
    for name in ("tied", "untied"):
        directory = tmp_path_factory.mktemp("models") / name
        model = make_model(tokenizer, hidden_size=128, layers=2, seed=1, tied=name == "tied")
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        directories[name] = directory
    return directories


@pytest.fixture
def world() -> Iterator[World]:
    torch.set_num_threads(1)
    with open_world(device="cpu", timeout_s=30) as world:
        yield world


@pytest.fixture
def make_learner(world: World) -> MakeLearner:
    def make(
        directory: Path,
        *,
        loss: DefaultLossConfig | None = None,
        lr: float = 0.0,
        compute_dtype: str = "float32",
        chunk_size: int = 7,
        max_norm: float | None = None,
        lora: LoRAConfig | None = None,
    ) -> Learner:
        config = TrainerModelConfig.model_validate(
            {"name": str(directory), "compute_dtype": compute_dtype, "fused_lm_head_chunk_size": chunk_size, "lora": lora}
        )
        model = load_policy(config, world)
        return Learner(
            model=model,
            optimizer=make_optimizer(model.trained_parameters, AdamWConfig(lr=lr)),
            learning_rate=LearningRate(peak=lr, schedule=ConstantSchedule(), max_steps=None),
            loss=cross_entropy if loss is None else make_policy_loss(loss),
            max_norm=max_norm,
            world=world,
        )

    return make


@pytest.fixture
def make_batches(make_learner, tiny_model: Path, oracle):
    def make(layout: RunLayout, *, from_step: int = 0, last: int = 6, parts: tuple[int, ...] = ()) -> dict[int, Batch]:
        check = oracle.make_row(oracle.make_examples(count=2, vocab_size=100))
        check.loss_mask_T[:] = check.position_ids_T > 0
        check.temperatures_T[:] = 1.0
        with torch.no_grad():
            scores = make_learner(tiny_model).model(to_tensors(check, device=torch.device("cpu")))
        check.logprobs_T[check.loss_mask_T] = scores.logprobs_N.numpy()
        batches = {from_step: make_batch(from_step, [] if from_step else [check], BatchPurpose.PROBE)}
        for step in range(from_step + 1, last + 1):
            row = oracle.make_row(oracle.make_examples(count=4, vocab_size=100, seed=step))
            batches[step] = make_batch(step, [row], BatchPurpose.TRAIN, has_part=step in parts)
            if step in parts:
                (begin_part(layout, Step(step), ORCHESTRATOR) / "state").write_text("x")
                finish_part(layout, Step(step), ORCHESTRATOR)
        return batches

    return make
