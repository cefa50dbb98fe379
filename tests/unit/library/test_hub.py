"""A policy is pushed, with its model card, by the real client to a stand-in for the hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.made_run import STEPS, make_run
from support.stand_in_hub import StandInHub
from trivet.config.layout import RunLayout
from trivet.errors import ConfigError
from trivet.library.run import Policy, Run
from trivet.telemetry.metrics import MetricsWriter

# What huggingface_hub says of its own upload of an LFS object.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    hub = StandInHub()
    with hub.served_url() as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield hub


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """The newest policy of a run that kept every promise, with the configuration of a run with reward functions."""
    layout = RunLayout(tmp_path)
    make_run(layout)
    for role in ("orchestrator", "trainer"):
        writer = MetricsWriter(layout.metrics / f"{role}.jsonl", resume_step=10**6)
        for step in range(1, STEPS + 1):
            writer.write(step, {"reward/mean": step / 10})
        writer.close()
    with (layout.configs / "trainer.toml").open("a") as file:
        file.write('[model]\nname = "org/base"\n')
    with (layout.configs / "orchestrator.toml").open("a") as file:
        file.write('[[env]]\nid = "x.py:load"\nname = "exact"\n[env.args]\napi_key = "planted-secret"\n')
        file.write('made_of = {reward_funcs = {exact = 1.0}, train_dataset = "64 examples"}\n')
    return Run(tmp_path).policy


def test_the_card_states_data_reward_steps_commit_and_proof(hub: StandInHub, policy: Policy) -> None:
    address = policy.push_to_hub("user/my-model", private=True, token="hf_x")
    assert address.endswith("/user/my-model/commit/abc")
    assert hub.repositories == {"user/my-model": True}
    weights = [name for name in hub.files if name.endswith(".safetensors")]
    assert {name: hub.files[name] for name in weights} == {name: (policy.directory / name).read_bytes() for name in weights}
    card = hub.files["README.md"].decode()
    assert card.startswith("---\nbase_model: org/base\nlibrary_name: transformers\n")
    for expected in (
        "| data | exact (reward_funcs: {'exact': 1.0}, train_dataset: 64 examples) |",
        "| reward | 0.3 in the first 5 steps, 0.7 in the last |",
        f"| steps | {STEPS} |",
        f"| commit | step {STEPS}, SHA-256 ",
        "| proof | consistent: ",
    ):
        assert expected in card
    assert "planted" not in card


def test_a_broken_history_is_said_on_the_card(hub: StandInHub, policy: Policy) -> None:
    events = RunLayout(policy.directory.parent.parent).events
    events.write_bytes(b"".join(line for line in events.read_bytes().splitlines(keepends=True) if b'"dispatch' not in line))
    policy.push_to_hub("user/my-model", token="hf_x")
    assert "| proof | broken: " in hub.files["README.md"].decode()


def test_a_refusal_of_the_hub_is_said_with_the_way_to_log_in(hub: StandInHub, policy: Policy) -> None:
    hub.refused_status = 401
    with pytest.raises(ConfigError, match=r"(?s)'user/my-model' cannot be pushed to http.*; log in with `hf auth login`"):
        policy.push_to_hub("user/my-model", token="hf_wrong")


def test_the_card_of_fine_tuning_names_its_conversations(hub: StandInHub, policy: Policy) -> None:
    configs = RunLayout(policy.directory.parent.parent).configs
    (configs / "orchestrator.toml").unlink()
    (configs / "sft.toml").write_text('[model]\nname = "org/base"\n[data]\nname = "org/chats"\n')
    policy.push_to_hub("user/my-model", token="hf_x")
    card = hub.files["README.md"].decode()
    assert "by supervised fine-tuning" in card
    assert "| data | org/chats |" in card
    assert "reinforcement" not in card
