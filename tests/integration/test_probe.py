"""What the probe of a policy finds: each fault, at the first load that has it, by the real server."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.adapters import publish_adapter, write_merged
from support.oracle import Oracle
from support.served import assert_serves
from support.servers import ServerProcess, open_client, reload_weights, run_server
from support.tiny_models import tiny_model_writer
from trivet.algorithms.probe import Probe, ProbeSample
from trivet.config.layout import MANIFEST, RunLayout
from trivet.errors import PolicyRefused
from trivet.storage.durable import write_json_atomically
from trivet.weights.manifest import Manifest, make_manifest, read_manifest
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion

pytestmark = pytest.mark.vllm

SAMPLES = [[99, 102, *range(4, 40), 100], [99, 103, *range(60, 4, -2)]]
Tensors = dict[str, torch.Tensor]


def expected_probe(model: Path) -> Probe:
    """Return the probe of the whole model in `model`, by plain transformers."""
    oracle = Oracle(model)
    scored = [ProbeSample(ids, oracle.logprobs(ids[:1], ids[1:], temperature=1.0)) for ids in SAMPLES]
    return Probe(dtype="float32", samples=scored)


def publish_proven(layout: RunLayout, model: Path, *, version: int) -> None:
    def write(directory: Path) -> None:
        for path in model.iterdir():
            (directory / path.name).write_bytes(path.read_bytes())

    publish(layout, version=PolicyVersion(version), run_id="test", write=write, probe=expected_probe(model))


@pytest.fixture(scope="module")
def server(tiny_model_untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "inference.stdout"
    with run_server(tiny_model_untied, log=log, module="support.faulty_server") as running:
        yield running


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape with other weights."""
    root = tmp_path_factory.mktemp("models")
    for version in (1, 2):
        tiny_model_writer(tied=False, seed=1000 + version)(root / str(version))
    return [root / "1", root / "2"]


def keep_old(pattern: str) -> Callable[[Tensors, Tensors], Tensors]:
    """Return a change that leaves the tensors whose name matches as they were before."""
    return lambda new, old: {name: (old if re.search(pattern, name) else new)[name] for name in new}


def transpose(name: str) -> Callable[[Tensors, Tensors], Tensors]:
    def change(new: Tensors, old: Tensors) -> Tensors:
        matrix = new[name]
        return new | {name: matrix.t().reshape(matrix.shape).contiguous()}

    return change


FILE_FAULTS: Mapping[str, Callable[[Tensors, Tensors], Tensors]] = {
    "a tensor is dropped": keep_old(r"layers\.1\.mlp\.down_proj"),
    "one layer stays as it was": keep_old(r"layers\.0\."),
    "the head is stale": keep_old("lm_head"),
    "a matrix is transposed": transpose("model.layers.1.self_attn.o_proj.weight"),
    "logits are scaled": lambda new, old: new | {"lm_head.weight": new["lm_head.weight"] * 1.05},
}
ENGINE_FAULTS = {"the norms have another epsilon": "epsilon", "the rope is scaled": "rope"}


@pytest.mark.parametrize("fault", [*FILE_FAULTS, *ENGINE_FAULTS])
def test_an_engine_with_a_fault_refuses_the_policy_and_serves_the_one_before(
    server: ServerProcess, models: list[Path], tmp_path: Path, fault: str
) -> None:
    layout = RunLayout(tmp_path)
    for version, model in enumerate(models, start=1):
        publish_proven(layout, model, version=version)
    broken = tmp_path / "faults" / "step_2"
    broken.parent.mkdir()
    if fault in FILE_FAULTS:
        tiny_model_writer(tied=False, seed=1002)(broken)
        new, old = (load_file(model / "model.safetensors") for model in reversed(models))
        save_file(FILE_FAULTS[fault](new, old), broken / "model.safetensors", metadata={"format": "pt"})
    else:
        broken.write_text(ENGINE_FAULTS[fault])

    async def scenario() -> None:
        async with aclosing(open_client(server.base_url, timeout_s=240)) as client:
            status = await client.update_weights(layout.weights_step(1))
            assert status.probe_mismatch is not None
            assert status.probe_mismatch < 1e-5
            with pytest.raises(PolicyRefused) as refused:
                await client.update_weights(layout.weights_step(2))
            print(f"{fault}: {re.search('differ by .* tokens', str(refused.value))[0]}")  # type: ignore[index]
            assert re.search(
                r"policy 2 as this server computes it is not the policy that the trainer computes with.*token \d+ at position \d+"
                r" of sample [01]: trainer .*, server .*policy 1 is served again",
                str(refused.value),
            )
            assert (await client.served_policy()).version == 1
            await assert_serves(client, layout.weights_step(1))

    asyncio.run(scenario())


def test_an_adapter_with_another_scale_than_the_trainers_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    for version in (1, 2):
        publish_adapter(layout, base=tiny_model, version=version)
        directory = layout.weights_step(version)
        merged = write_merged(tmp_path / f"merged_{version}", adapter=directory, base=tiny_model)
        if version == 2:
            config = json.loads((directory / "adapter_config.json").read_bytes())
            (directory / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": config["lora_alpha"] * 2}))
        manifest: Manifest = make_manifest(
            directory, version=PolicyVersion(version), run_id="test", probe=expected_probe(merged)
        )
        write_json_atomically(directory / MANIFEST, manifest)

    async def scenario(base_url: str) -> None:
        async with aclosing(open_client(base_url, timeout_s=240)) as client:
            assert (await client.update_weights(layout.weights_step(1))).probe_mismatch is not None
            with pytest.raises(PolicyRefused, match="policy 2 as this server computes it is not the policy"):
                await client.update_weights(layout.weights_step(2))
            await assert_serves(client, tmp_path / "merged_1")

    flags = {"enable_lora": "true", "max_lora_rank": "8"}
    with run_server(tiny_model, log=tmp_path / "inference.stdout", **flags) as server:
        asyncio.run(scenario(server.base_url))


def test_requests_that_wait_for_a_policy_which_is_refused_fail_and_none_gets_a_token_of_it(
    server: ServerProcess, models: list[Path], tmp_path: Path
) -> None:
    reload_weights(server.base_url)
    layout = RunLayout(tmp_path)
    publish_proven(layout, models[0], version=1)
    path = layout.weights_step(1) / MANIFEST
    probe = read_manifest(layout.weights_step(1)).probe
    assert probe is not None
    wrong = Probe(
        dtype="float32", samples=[ProbeSample(sample.token_ids, [-1.0] * len(sample.logprobs)) for sample in probe.samples]
    )
    write_json_atomically(path, make_manifest(layout.weights_step(1), version=PolicyVersion(1), run_id="test", probe=wrong))

    async def scenario() -> None:
        async with aclosing(open_client(server.base_url, timeout_s=240)) as client:
            spanning = asyncio.create_task(client.generate([5, 6, 7, 8], max_tokens=900, temperature=1.0, seed=1))
            await asyncio.sleep(0.5)
            with pytest.raises(PolicyRefused, match="policy 0 is served again"):
                await client.update_weights(layout.weights_step(1))
            answers = await asyncio.gather(spanning, return_exceptions=True)
            after = await client.generate([5, 6, 7, 8], max_tokens=8, temperature=1.0, seed=1)
        if not isinstance(answers[0], Exception):
            assert {run.version for run in answers[0].versions} == {0}, "it ended before the load"
        assert {run.version for run in after.versions} == {0}

    asyncio.run(scenario())
