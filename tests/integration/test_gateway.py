"""`trivet gateway` over the real vLLM: an agent elsewhere gets a session, asks, and reports in."""

import json
import signal
import subprocess
from pathlib import Path

import httpx
import openai
import pytest

from support.processes import wait_until
from support.servers import run_server
from trivet.process.lifetime import module_command

pytestmark = pytest.mark.vllm


def test_what_a_session_asked_is_written_with_its_reward(tmp_path: Path, tiny_model: Path) -> None:
    output, key_file, log = tmp_path / "sessions.jsonl", tmp_path / "key", tmp_path / "gateway.log"
    with run_server(tiny_model, log=tmp_path / "server.log") as server, log.open("wb") as file:
        words = ["gateway", "--base-url", server.base_url, "--output", str(output), "--key-file", str(key_file)]
        gateway = subprocess.Popen(module_command("trivet.cli.main", *words, "--max-tokens", "5"), stdout=file, stderr=file)
        try:
            wait_until(lambda: "gateway at " in log.read_text(), timeout_s=60, waiting_for="the gateway")
            address = log.read_text().partition("gateway at ")[2].partition(",")[0]
            assert httpx.post(address, headers={"Authorization": "Bearer guess"}).status_code == 401
            own = {"Authorization": f"Bearer {key_file.read_text().strip()}"}
            told, _ = (httpx.post(address, headers=own).json() for _ in range(2))
            with openai.OpenAI(base_url=told["base_url"], api_key=told["api_key"]) as client:
                first = client.responses.create(model="any", input="say")
                again = [{"role": "user", "content": "say"}, *(item.model_dump() for item in first.output)]
                client.responses.create(model="any", input=[*again, {"role": "user", "content": "more"}])
            httpx.post(told["reward_url"], headers={"Authorization": f"Bearer {told['api_key']}"}, json=0.5).raise_for_status()
            wait_until(output.exists, timeout_s=20, waiting_for="the session's record")
        finally:
            gateway.send_signal(signal.SIGTERM)
            gateway.wait(20)
    record, forgotten = sorted(map(json.loads, output.read_text().splitlines()), key=lambda record: record["id"])
    assert (forgotten["id"], forgotten["reward"]) == (2, None)
    assert "the gateway was ended" in forgotten["failure"]
    assert (record["reward"], record["failure"], len(record["turns"])) == (0.5, "", 2)
    assert sum(map(sum, (sample["loss_mask"] for sample in record["samples"]))) == 10
    assert all(len(sample["token_ids"]) == len(sample["logprobs"]) for sample in record["samples"])
