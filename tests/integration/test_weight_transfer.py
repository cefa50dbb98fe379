"""Policies that the trainer sends into the memory of real servers, over real gloo; and what is left of a server that misses them.

The trainer's end is a real `WeightSender`, in this process or, to be killed, in another. `support.transfers.Rounds` is the
orchestrator's end.
"""

import asyncio
import json
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.families import FAMILIES
from support.histories import assert_proven
from support.rl_run import Run
from support.served import PROMPTS, busy, greedy
from support.servers import ServerProcess, open_client, run_server
from support.tiny_models import tiny_model_writer
from support.transfers import Rounds, SenderProcess, open_weight_sender, publish_for_transfer
from trivet.client.inference_client import Generation
from trivet.config.layout import RunLayout
from trivet.errors import InferenceError
from trivet.examples.tiny_model import make_tokenizer
from trivet.history.check import check_run
from trivet.telemetry.events import read_events
from trivet.transfer.group import TransferGroup
from trivet.weights.publish import publish
from trivet.wire.events import Load
from trivet.wire.versions import PolicyStatus, PolicyVersion, TransferRound

MakeRun = Callable[..., Run]
pytestmark = pytest.mark.vllm

POINTS = ("transfer.init", "transfer.receive", "reload.before", "reload.during")
"""Before the workers connect, while they receive, before and after the load from memory."""


def answers(base_url: str) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities of each prompt, asked one after the other."""

    async def scenario() -> list[Generation]:
        async with aclosing(open_client(base_url, timeout_s=240)) as client:
            return [await greedy(client, prompt) for prompt in PROMPTS]

    return [(list(each.token_ids), list(each.logprobs)) for each in asyncio.run(scenario())]


def start_server(stack: ExitStack, model: Path, directory: Path, **flags: str) -> ServerProcess:
    """Start a server for transfers whose run is `directory`: servers of one directory have one secret."""
    log = directory / f"inference-{len(list(directory.glob('*.stdout')))}.stdout"
    return stack.enter_context(run_server(model, log=log, **{"weights_transport": "gloo", **flags}))


def sources(found: list[PolicyStatus | InferenceError]) -> list[str]:
    return [each.source if isinstance(each, PolicyStatus) else "failed" for each in found]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_servers_of_a_mixture_equal_a_fresh_one_to_the_last_bit(stack: ExitStack, tmp_path: Path) -> None:
    """Experts and the head of its own are what the CPU needs packed again."""
    family = next(each for each in FAMILIES if each.key == "qwen3-moe")

    def write(directory: Path, *, seed: int) -> None:
        family.save(directory, **family.served_changes)
        generator = torch.Generator().manual_seed(seed)
        for file in directory.glob("*.safetensors"):
            tensors = load_file(file)
            noise = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
            save_file({name: tensor + 0.02 * noise[name] for name, tensor in tensors.items()}, file, {"format": "pt"})
        make_tokenizer().save_pretrained(directory)

    layout = RunLayout(tmp_path / "run")
    write(tmp_path / "start", seed=1)
    for version in (1, 2):
        publish(
            layout,
            version=PolicyVersion(version),
            run_id="test",
            write=lambda directory, version=version: write(directory, seed=10 + version),
        )
    dtype = {"model.dtype": family.served_dtype}
    first = start_server(stack, tmp_path / "start", tmp_path, **dtype)
    second = start_server(stack, layout.weights_step(1), tmp_path, **dtype)
    before, fresh = answers(first.base_url), answers(second.base_url)
    assert before != fresh
    sender = open_weight_sender(layout, first.base_url)
    rounds = Rounds(layout, [first.base_url, second.base_url], announce=sender.begin)
    for version in (1, 2, 1):
        found = rounds.load(version)
        assert sources(found) == ["gloo", "gloo"]
        of_first, of_second = answers(first.base_url), answers(second.base_url)
        assert of_first == of_second
        assert (of_first == fresh) is (version == 1)


def test_a_server_killed_in_any_phase_comes_back_from_the_files(
    stack: ExitStack, tiny_model_untied: Path, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path / "run")
    for version in range(1, len(POINTS) + 2):
        publish_for_transfer(layout, version=version, tied=False)
    schedule = tmp_path / "faults.json"
    faults = [
        {"name": point, "point": point, "action": "kill", "step": version} for version, point in enumerate(POINTS, start=1)
    ]
    schedule.write_text(json.dumps({"seed": 0, "faults": faults}))
    healthy = start_server(stack, tiny_model_untied, tmp_path)
    sender = open_weight_sender(layout, healthy.base_url)
    rounds = Rounds(layout, [healthy.base_url], announce=sender.begin, timeout_s=5)
    for version, point in enumerate(POINTS, start=1):
        with ExitStack() as mortal:
            doomed = start_server(mortal, tiny_model_untied, tmp_path, **{"faults.schedule": str(schedule)})
            rounds.urls[1:] = [doomed.base_url]
            found = rounds.load(version)
            assert doomed.process.wait(60) == -signal.SIGKILL, point
            assert isinstance(found[1], InferenceError)
            assert isinstance(found[0], PolicyStatus)
            assert found[0].version == version
            # A server that is lost while it receives may be noticed once the other one has everything.
            allowed = {"transfer.init": {"files"}, "transfer.receive": {"files", "gloo"}}.get(point, {"gloo"})
            assert found[0].source in allowed, point
        with ExitStack() as mortal:
            again = start_server(mortal, layout.weights_step(version), tmp_path)
            assert answers(again.base_url) == answers(healthy.base_url), point
            if point == POINTS[-1]:
                rounds.urls[1:] = [again.base_url]
                assert sources(rounds.load(version + 1)) == ["gloo", "gloo"], "the group is made again with the new server"
                assert answers(again.base_url) == answers(healthy.base_url)


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_trainer_lost_in_mid_transfer_leaves_the_servers_with_the_files(
    stack: ExitStack, tiny_model_untied: Path, tmp_path: Path, action: str
) -> None:
    layout = RunLayout(tmp_path / "run")
    publish_for_transfer(layout, version=1, tied=False)
    servers = [start_server(stack, model, tmp_path) for model in (tiny_model_untied, layout.weights_step(1))]
    fresh = answers(servers[1].base_url)
    sender = stack.enter_context(SenderProcess(layout, servers[0].base_url, action=action))
    rounds = Rounds(layout, [server.base_url for server in servers], announce=sender.begin, timeout_s=5)
    assert sources(rounds.load(1)) == ["files", "files"]
    assert [answers(server.base_url) for server in servers] == [fresh, fresh]


def test_files_that_are_not_those_of_the_manifest_are_not_served(
    stack: ExitStack, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RunLayout(tmp_path / "run")
    publish_for_transfer(layout, version=1)
    server = start_server(stack, tiny_model, tmp_path)

    def with_a_flipped_bit(
        group: TransferGroup, transfer: TransferRound, files: Iterable[torch.Tensor], *, rank: int = 0
    ) -> None:
        def altered() -> Iterator[torch.Tensor]:
            for file in files:
                file[-3] ^= 1  # memory of this process: the file on disk stays as it is
                yield file

        broadcast(group, transfer, altered(), rank=rank)

    broadcast = TransferGroup.broadcast
    monkeypatch.setattr(TransferGroup, "broadcast", with_a_flipped_bit)
    sender = open_weight_sender(layout, server.base_url)
    rounds = Rounds(layout, [server.base_url], announce=sender.begin)
    assert sources(rounds.load(1)) == ["files"]
    assert "did not arrive as it was published" in server.log.read_text()
    from_files = answers(server.base_url)
    monkeypatch.setattr(TransferGroup, "broadcast", broadcast)
    assert sources(rounds.load(1)) == ["gloo"]
    assert answers(server.base_url) == from_files, "both are the published policy"


def test_a_policy_that_the_trainer_lacks_is_loaded_from_files_and_one_whose_files_are_gone_from_memory(
    stack: ExitStack, tiny_model: Path, tmp_path: Path
) -> None:
    layout, of_trainer = RunLayout(tmp_path / "run"), RunLayout(tmp_path / "elsewhere")
    publish_for_transfer(layout, version=1)
    server = start_server(stack, tiny_model, tmp_path)
    sender = open_weight_sender(of_trainer, server.base_url)
    rounds = Rounds(layout, [server.base_url], announce=sender.begin)
    assert sources(rounds.load(1)) == ["files"]
    log = server.log.read_text()
    assert log.index("loading from files, not received") < log.index("policy loaded version=1")
    publish_for_transfer(of_trainer, version=2)
    shutil.copytree(of_trainer.weights_step(2), layout.weights_step(2), ignore=shutil.ignore_patterns("*.safetensors"))
    assert sources(rounds.load(2)) == ["gloo"]


def test_requests_go_on_while_workers_wait_for_the_trainer(stack: ExitStack, tiny_model: Path, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    publish_for_transfer(layout, version=1)
    server = start_server(stack, tiny_model, tmp_path)
    rounds = Rounds(layout, [server.base_url], announce=lambda _: None, timeout_s=20)

    async def scenario() -> None:
        loading = asyncio.create_task(asyncio.to_thread(rounds.load, 1))
        while not rounds.announced:  # noqa: ASYNC110  another thread fills it
            await asyncio.sleep(0.01)
        async with busy(server.base_url, num_tokens=40):
            assert not loading.done(), "no trainer comes, and the engine samples"
        assert sources(await loading) == ["files"]

    asyncio.run(scenario())


def test_every_policy_of_a_run_is_sent_from_memory_and_the_run_is_proven(make_run: MakeRun) -> None:
    run = make_run(max_steps=6)
    run.start("--weights.transport", "gloo")
    assert run.await_exit() == 0, run.output[-4000:]
    loads = [each for each in read_events(run.layout.events) if isinstance(each, Load) and each.version]
    assert {each.source for each in loads} == {"gloo"}
    versions = [each.version for each in loads]
    assert versions == sorted(set(versions)), "a policy that a newer one overtakes is not loaded"
    assert_proven(check_run(run.layout))
    probes = {each.probe_mismatch is None for each in loads}
    assert probes == {False}, "each policy was compared with the trainer's log-probabilities before it was served"


@pytest.mark.gpu
def test_a_policy_that_nccl_sends_equals_a_fresh_engine(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's end is on the first GPU, the servers are on the second. NCCL connects no two processes on one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.init()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    layout = RunLayout(tmp_path / "run")
    for version in (1, 2):
        publish_for_transfer(layout, version=version, hidden_size=256)
    tiny_model_writer(hidden_size=256)(tmp_path / "start")
    flags = {
        "weights_transport": "nccl",
        "model.dtype": "bfloat16",
        "model.enforce-eager": "false",
        "gpu-memory-utilization": "0.3",
    }
    server = start_server(stack, tmp_path / "start", tmp_path, **flags)
    fresh = start_server(stack, layout.weights_step(1), tmp_path, **flags)
    sender = open_weight_sender(layout, server.base_url, device="cuda:0")
    rounds = Rounds(layout, [server.base_url], announce=sender.begin)
    before = answers(server.base_url)
    for version in (1, 2, 1):
        assert sources(rounds.load(version)) == ["nccl"]
        assert (answers(server.base_url) == answers(fresh.base_url)) is (version == 1)
    assert before != answers(fresh.base_url)
