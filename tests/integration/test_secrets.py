"""Secrets in a configuration appear in nothing that a run writes or prints, except configs/."""

import os
import stat
from pathlib import Path

import pytest

from support.rl_run import CONFIG, Run
from trivet.view.configs import read_configs

pytestmark = pytest.mark.vllm

PLANTED = "planted-secret-4711"
SECRETS = f"""
[orchestrator.client.headers]
Authorization = "Bearer {PLANTED}"
"X-Team" = "{PLANTED}"

[orchestrator.heartbeat]
url = "http://me:{PLANTED}@127.0.0.1:9/{PLANTED}?token={PLANTED}"

[orchestrator.sampling.extra_body]
api_token = "{PLANTED}"
"""
CONFIGURED = CONFIG.replace(
    'id = "vowels"', f'id = "vowels"\nargs = {{{{ api_key = "{PLANTED}", num_examples = 8 }}}}'
).replace("[orchestrator.sampling]\n", SECRETS + "[orchestrator.sampling]\n")


def files_with_the_secret(*roots: Path) -> list[Path]:
    found = [Path(parent, name) for root in roots for parent, _, names in os.walk(root) for name in names]
    return [path for path in found if path.is_file() and PLANTED.encode() in path.read_bytes()]


def test_a_finished_run_holds_planted_secrets_in_its_private_configurations_alone(tmp_path: Path, tiny_model: Path) -> None:
    run = Run(tmp_path / "work", tiny_model, max_steps=2, template=CONFIGURED)
    run.start(
        "--orchestrator.eval.interval", "1", "--orchestrator.eval.env.id", "vowels", "--orchestrator.eval.num-examples", "2"
    )
    assert run.await_exit() == 0, run.output
    found = files_with_the_secret(run.layout.root)
    assert found == [run.layout.configs / "orchestrator.toml"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in run.layout.configs.iterdir()} == {0o600}
    assert PLANTED not in run.output
    assert PLANTED not in str(read_configs(run.layout))
