"""Compare the messages that users see with tests/unit/messages.txt: one place for every wording.

The file has lines `$ COMMAND FLAGS`, each followed by what the configuration answers to it. `run` is `rl` with the flags below.
`$ help COMMAND` is the head of the command's help, `$ exit CODE` how a log describes the end of a process. A case is added as a
line. `pytest tests/unit/test_messages.py --update` writes the answers anew, and a review sees each change of wording there.
"""

import shlex
from pathlib import Path

import pytest

from trivet.config.load import load_config
from trivet.config.reference import help_text
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError
from trivet.exits import describe_exit

MESSAGES = Path(__file__).with_name("messages.txt")
RUN = ("--orchestrator.rollouts-per-example", "2", "--max-steps", "10", "--max-model-len", "2048")
HELP_LINES = 8
KINDS = {
    "rl": RLConfig,
    "run": RLConfig,
    "sft": SftConfig,
    "eval": EvalConfig,
    "inference": InferenceConfig,
    "orchestrator": OrchestratorConfig,
    "trainer": TrainerConfig,
}


def answer(line: str) -> str:
    """Return the error of a command line, or else its notices, one a line."""
    command, *flags = shlex.split(line)
    if command == "exit":
        return describe_exit(int(flags[0]))
    if command == "help":
        return "\n".join(help_text(KINDS[flags[0]]).splitlines()[:HELP_LINES])
    try:
        return "\n".join(load_config(KINDS[command], [*(RUN if command == "run" else ()), *flags], environ={}).notices)
    except ConfigError as exc:
        return str(exc)


def test_messages_are_those_of_the_file(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    before = MESSAGES.read_text()
    lines = [line.removeprefix("$ ") for line in before.splitlines() if line.startswith("$ ")]
    after = "\n".join(f"$ {line}\n{answer(line)}\n" for line in lines)
    if request.config.getoption("--update"):
        MESSAGES.write_text(after)
    assert after.splitlines() == before.splitlines(), "if each change is meant: pytest tests/unit/test_messages.py --update"
