import io
import stat
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from trivet.checkpoints.settings import CONFIG_FILE, require_same_settings, write_settings
from trivet.config.command import run_command
from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.load import load_config
from trivet.config.masking import HIDDEN, hide_in_addresses, hide_values, mask, mask_table
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.shared import CkptConfig
from trivet.evaluation.results import TaskRecord
from trivet.launcher.run_directory import write_configs
from trivet.view.run import read_configs
from trivet.wire.groups import SamplingArguments
from trivet.wire.versions import Step

PLANTED = """
rollouts_per_example = 2

[client.headers]
"X-Api-Key" = "planted-1"
cookie = "planted-2"
X-Team = "planted-3"

[heartbeat]
url = "https://me:planted-4@example.org/planted-5?token=planted-6"

[[env]]
id = "reverse-text"

[env.args]
apikey = "planted-7"
wandb_key = "planted-8"
"X-Token" = "planted-9"
dsn = "postgres://user:p@planted-10@db/x"
extra_headers = { X-Team = "planted-14" }
login = { user = "anna", password = "planted-11" }
access_tokens = ["planted-12"]
pin_secret = 4711811
max_tokens = 512

[sampling.extra_body]
bearer = "planted-13"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "orchestrator.toml"
    path.write_text(PLANTED)
    return path


@pytest.fixture
def config(file: Path) -> OrchestratorConfig:
    return load_config(OrchestratorConfig, ["@", str(file)], environ={}).config


def test_every_planted_secret_is_hidden_and_nothing_else(config: OrchestratorConfig) -> None:
    shown = to_toml(config, is_masked=True)
    assert "planted" not in shown
    assert "4711811" not in shown
    assert to_toml(config).count("planted") == 14
    values = tomllib.loads(shown)
    assert values["env"][0]["args"]["max_tokens"] == 512
    assert values["env"][0]["args"]["dsn"] == "postgres://***@db/x"
    assert values["heartbeat"]["url"] == f"https://***@example.org/{HIDDEN}"
    plain = tomllib.loads(to_toml(OrchestratorConfig()))
    assert mask_table(plain) == plain, "a key of ours is taken for a secret"


def test_masking_twice_changes_nothing_more(config: OrchestratorConfig) -> None:
    once = mask_table(tomllib.loads(to_toml(config)))
    assert mask_table(once) == once


def test_a_dry_run_shows_no_secret(file: Path) -> None:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        assert run_command(OrchestratorConfig, lambda _: 0, ["@", str(file), "--dry-run"]) == 0
    assert "max_tokens = 512" in out.getvalue()
    assert "planted" not in out.getvalue() + err.getvalue()


@pytest.mark.parametrize(
    "argv",
    [
        ["--heartbeat.url", "planted"],
        ["--client.headers.x", "[1,2]", "--client.headers", "{planted"],
        ["--client.base-url", "ftp://me:planted@h/"],
        ["--client.headers", '{"a": {"b": "planted"}}'],
    ],
)
def test_an_error_about_a_secret_does_not_show_it(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(OrchestratorConfig, lambda _: 0, argv) == 2
    assert "planted" not in capsys.readouterr().err


def test_the_page_shows_no_secret_of_the_files_that_roles_read(config: OrchestratorConfig, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    path = layout.configs / "orchestrator.toml"
    write_configs({path: config})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert tomllib.loads(path.read_text())["client"]["headers"]["cookie"] == "planted-2"
    assert "planted" not in str(read_configs(layout))


def test_a_checkpoint_holds_no_secret_and_a_new_key_may_resume_it(config: OrchestratorConfig, tmp_path: Path) -> None:
    write_settings(tmp_path, config)
    assert "planted" not in (tmp_path / CONFIG_FILE).read_text()
    renewed = config.model_copy(
        update={"env": [config.env[0].model_copy(update={"args": {**config.env[0].args, "apikey": "new"}})]}
    )
    require_same_settings(tmp_path, renewed, ckpt=CkptConfig(), step=Step(1))


def test_the_record_of_an_evaluation_holds_no_secret() -> None:
    record = TaskRecord(
        env="a",
        env_id="a",
        env_args={"api_key": "planted", "level": 3},
        split="eval",
        step=0,
        digest="",
        first_example=0,
        num_examples=1,
        rollouts_per_example=1,
        sampling=SamplingArguments(temperature=1.0),
        data_digest="",
    )
    assert record.env_args == {"api_key": HIDDEN, "level": 3}


@pytest.mark.parametrize(
    "name", ["api_key", "HF_TOKEN", "Authorization", "passwd", "client_secret", "Set-Cookie", "sessionCredential"]
)
def test_a_name_that_contains_a_word_for_secrets_is_hidden(name: str) -> None:
    assert mask(("env", "args", name), "x") == HIDDEN
    assert mask(("env", "args", name, "inner"), ["x"]) == [HIDDEN]


@pytest.mark.parametrize("key", ["max_tokens", "tokenizer", "hash_keys", "author", "level"])
def test_a_name_that_only_looks_like_one_is_shown(key: str) -> None:
    assert mask((key,), 7) == 7
    assert mask((key,), "x") == "x"


def test_addresses_in_a_text_lose_their_passwords() -> None:
    text = "GET https://me:planted@h:80/x?a=1&api_key=planted#y failed, so did http://h/@home"
    assert hide_in_addresses(text) == "GET https://***@h:80/x?a=1&api_key=***#y failed, so did http://h/@home"


def test_a_text_of_code_that_has_secrets_is_shown_without_them() -> None:
    assert hide_values("no user planted-1 or abc", {"key": "planted-1", "name": "abc"}) == f"no user {HIDDEN} or abc"
