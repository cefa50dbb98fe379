"""Trains a toy of a family for a step, publishes it with its probe, loads it into a real server, and compares log-probabilities."""

import asyncio
import re
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from support.families import Family
from support.servers import open_client, run_server
from trivet.algorithms.packing import PackItem, pack
from trivet.algorithms.probe import convert_dtype
from trivet.client.inference_client import InferenceClient
from trivet.config.layout import RunLayout
from trivet.config.schema.model import LoRAConfig
from trivet.config.schema.trainer import AdamWConfig, ConstantSchedule, TrainerModelConfig
from trivet.errors import InferenceError, TrivetError
from trivet.examples.tiny_model import make_tokenizer
from trivet.trainer.losses.formulas import cross_entropy
from trivet.trainer.model.blocks import find_blocks
from trivet.trainer.model.export import Exporter
from trivet.trainer.model.policy_model import PolicyModel, load_policy
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.probe import score
from trivet.trainer.ranks.world import World, open_world
from trivet.trainer.rows import plan_rows
from trivet.trainer.step import Learner, train_step
from trivet.weights.publish import publish
from trivet.wire.rollouts import Sample
from trivet.wire.versions import PolicyVersion, Step

LIMITS = {"float32": 2e-3, "bfloat16": 0.1}
"""Nats by which log-probabilities may differ, where weights are large and the softmax is sharp: any of them in float32, their
average in bfloat16, in which a token may be sent to other experts. Faults were seen to give up to 4."""
LENGTHS = (12, 40, 70)
"""Tokens of the sequences that are compared: within a window, and beyond it."""
_RANK = 8
_LORA_FLAGS = {"enable_lora": "true", "max_loras": "2", "max_cpu_loras": "2", "max_lora_rank": str(_RANK)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The result of serving a family, by way of training."""

    full: str
    """`agrees`; or what failed, in the words of who refused it."""
    lora: str


def save_toy(family: Family, directory: Path) -> Path:
    """Write the toy's files and a tokenizer, for a server."""
    family.save(directory, **family.served_changes)
    make_tokenizer().save_pretrained(directory)
    return directory


def serve_family(family: Family, directory: Path) -> Served:
    """Start a server from the toy; have it load a policy that was trained whole, then an adapter; compare each."""
    toy = save_toy(family, directory / "toy")
    reason = ""
    for flags in (_LORA_FLAGS, {}):
        log = directory / f"{'lora' if flags else 'full'}.log"
        try:
            with run_server(toy, log=log, **flags, **{"model.dtype": family.served_dtype}) as server:
                return asyncio.run(
                    _load_policies(toy, server.base_url, directory, dtype=family.served_dtype, lora=reason or None)
                )
        except (AssertionError, InferenceError):  # the server ended, before it was ready or at a request
            reason = f"server: {_last_error(log.read_text(errors='replace'))}"
    return Served(full=reason, lora=reason)


async def _load_policies(toy: Path, base_url: str, directory: Path, *, dtype: str, lora: str | None) -> Served:
    layout = RunLayout(directory / "run")
    async with aclosing(open_client(base_url, timeout_s=240)) as client:
        full = await _load_policy(client, toy, layout, version=1, dtype=dtype, adapter=None)
        if lora is None:
            lora = await _load_policy(client, toy, layout, version=2, dtype=dtype, adapter=_adapter_of(toy))
    return Served(full=full, lora=lora)


async def _load_policy(
    client: InferenceClient, toy: Path, layout: RunLayout, *, version: int, dtype: str, adapter: LoRAConfig | None
) -> str:
    """Compare policy 0, train a step, publish, load and compare again."""
    torch.set_num_threads(1)
    name = await client.model_name()
    try:
        with open_world(device="cpu", timeout_s=30) as world:
            config = {"name": str(toy), "compute_dtype": dtype, "dither": False, "lora": adapter}
            model = load_policy(TrainerModelConfig.model_validate(config), world)
            if (found := await _compare(client, model, name=name, limit=LIMITS[dtype])) and adapter is None:
                return f"at the start {found}"
            _train_and_publish(model, layout, world, version=version, dtype=dtype)
            await client.update_weights(layout.weights_step(version))
            return await _compare(client, model, name=name, limit=LIMITS[dtype]) or "agrees"
    except InferenceError as exc:
        if re.search("ReadError|ConnectError|EngineCore", str(exc)):  # there is no server any more; its log says why
            raise
        return f"server: {' '.join(str(exc).split())[:300]}"
    except TrivetError as exc:
        return " ".join(str(exc).split())[:300]


def _train_and_publish(model: PolicyModel, layout: RunLayout, world: World, *, version: int, dtype: str) -> None:
    learner = Learner(
        model=model,
        optimizer=make_optimizer(model.trained_parameters, AdamWConfig(lr=1e-2)),
        learning_rate=LearningRate(peak=1e-2, schedule=ConstantSchedule(), max_steps=None),
        loss=cross_entropy,
        max_norm=None,
        world=world,
    )
    train_step(learner, pack(_items(), seq_len=256), step=Step(1))
    exporter = Exporter(model=model, tokenizer=make_tokenizer(), dtype=getattr(torch, dtype))
    weights = exporter.gather(keep=True)
    publish(
        layout,
        version=PolicyVersion(version),
        run_id="test",
        write=lambda path: exporter.write(path, dict(weights)),
        probe=score(model, [item.sample.token_ids_T.tolist() for item in _items()], world, dtype=convert_dtype(dtype)),
    )


def publish_trained(family: Family, directory: Path) -> tuple[Path, Path]:
    """Write the toy, train it for a step and publish that as version 1; return the directories of both."""
    toy, layout = save_toy(family, directory / "toy"), RunLayout(directory / "run")
    with open_world(device="cpu", timeout_s=30) as world:
        config = {"name": str(toy), "compute_dtype": family.served_dtype, "dither": False}
        model = load_policy(TrainerModelConfig.model_validate(config), world)
        _train_and_publish(model, layout, world, version=1, dtype=family.served_dtype)
    return toy, layout.weights_step(1)


async def _compare(client: InferenceClient, model: PolicyModel, *, name: str, limit: float) -> str:
    """Return by how much log-probabilities differ; an empty text where they agree."""
    errors: list[float] = []
    model.eval()
    for item in _items():
        plan = plan_rows(pack([item], seq_len=256), num_ranks=1, packs=model.packs)
        with torch.no_grad():
            (row,) = plan.take(0, device=torch.device("cpu"))
            ours = model(row).logprobs_N.numpy()
        theirs = np.array(await client.score(item.sample.token_ids_T.tolist(), model=name))[1:]
        errors += np.abs(ours - theirs).tolist()
    found = max(errors) if limit == LIMITS["float32"] else sum(errors) / len(errors)
    return "" if found <= limit else f"differs by up to {max(errors):.2g}, {sum(errors) / len(errors):.2g} on average"


def _items() -> list[PackItem]:
    generator = np.random.default_rng(5)
    samples = [
        Sample(
            token_ids_T=generator.integers(1, 96, length).astype(np.int32),
            loss_mask_T=np.arange(length) > 0,
            logprobs_T=np.zeros(length, dtype=np.float32),
            versions=[],
            temperature=1.0,
        )
        for length in LENGTHS
    ]
    return [PackItem(sample=sample, advantage=0.0) for sample in samples]


def _adapter_of(toy: Path) -> LoRAConfig:
    """Return an adapter of the linear modules of attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(toy))
    names = {
        name.rpartition(".")[2]
        for block in find_blocks(model)
        for name, module in block.named_modules()
        if isinstance(module, torch.nn.Linear) and re.search(r"att", name)
    }
    return LoRAConfig(rank=_RANK, target_modules=sorted(names) or ["q_proj"])


def _last_error(log: str) -> str:
    """Return the last error of the log, without times and processes."""
    lines = [line for line in log.splitlines() if not re.search(r"ulimit|EngineDeadError|Engine core init|server closed", line)]
    found = [
        match.group() for line in lines if (match := re.search(r"\b\w*(Error|Exception)(: .*|$)|Assertion failed.*", line))
    ]
    return (found or ["no error in its log"])[-1][:300]
