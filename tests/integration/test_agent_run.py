"""`rl` trains on an agent that is a shell script with curl: real roles, the real vLLM and a tiny model."""

import json
import shutil
from pathlib import Path

import pytest

from support.histories import assert_proven
from support.rl_run import CONFIG, Run
from trivet.history.check import check_run

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(shutil.which("curl") is None, reason="the agent needs curl")]
MAX_STEPS = 12
AGENT = Path(__file__).parents[2] / "configs" / "examples" / "agent.sh"
ENVIRONMENT = """
[[orchestrator.env]]
id = "agent"
name = "shell"
args = {{ command = ["bash", "{agent}"], tasks = "{tasks}" }}
"""


def test_a_shell_script_with_curl_is_trained_on_and_proven(tmp_path: Path, tiny_model: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": "say", "number": number}) + "\n" for number in range(8)))
    environment = ENVIRONMENT.replace("{agent}", str(AGENT)).replace("{tasks}", str(tasks))
    template = CONFIG.replace('[[orchestrator.env]]\nid = "vowels"\n', environment)
    run = Run(tmp_path / "run", tiny_model, max_steps=MAX_STEPS, template=template)
    assert run.start().wait(600) == 0, run.output()
    report = assert_proven(check_run(run.layout))
    assert report.last_step == MAX_STEPS
    rows = [json.loads(line) for line in (run.layout.metrics / "orchestrator.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    (first, *_) = (run.layout.rollouts / "step_1" / "rollouts.jsonl").read_text().splitlines()
    assert json.loads(first)["env"] == "shell"
