"""Input that no machine can use ends with exit code 2 and one line that names the key or the argument."""

import codecs
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from trivet.config.command import run_command
from trivet.config.schema.base import Section
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.user_input import MAX_DEPTH
from trivet.conversations.sources import open_source
from trivet.errors import ConfigError

DEEP = 5000
DEEP_JSON = "[" * DEEP + "]" * DEEP


def refusal(
    capsys: pytest.CaptureFixture[str], *argv: str, kind: type[Section] = TrainerConfig, environ: dict[str, str] | None = None
) -> str:
    """Run `kind` dry with `argv`. Return its message, which must be one line with exit code 2."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environ or {}).items():
            patch.setenv(name, value)
        assert run_command(kind, lambda _: 0, [*argv, "--dry-run"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1, said.err
    assert len(said.err) < 2000
    return said.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"seed = {'1' * 6000}", "is not valid TOML"),
        (f"seed = {2**70}", "more than 64 bits"),
        (f"betas = {DEEP_JSON}", "levels deep"),
        (f"betas = {'[' * 100}{']' * 100}", "levels deep"),
        ("x = " + "{a = " * DEEP + "1" + "}" * DEEP, "levels deep"),
        (".".join(["a"] * DEEP) + " = 1", "levels deep"),
        ('toml_files = ["a\\u0000b.toml"]', "a\\x00b.toml) holds a character that no path can have"),
        (f'toml_files = ["{"x" * 5000}"]', "toml_files"),
        ('output_dir = "a\\u0000b"', "output_dir (a\\x00b) holds a character that no path can have"),
        (f'output_dir = "{"x" * 5000}"', "output_dir"),
        ('"\\u001b[31m" = 1', "unknown key \\x1b[31m"),
        ("#" * (2 << 20), "larger than 1 MiB"),
    ],
    ids=[
        *("6,000 digits", "70 bits", "deep arrays", "arrays of 100", "deep tables", "deep keys", "NUL in base", "long base"),
        *("NUL in path", "long path", "escape in key", "2 MiB"),
    ],
)
def test_a_file_that_breaks_a_limit_is_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text)
    assert said in refusal(capsys, "@", str(file))


def test_a_file_of_thousands_of_unknown_keys_is_refused_with_the_first_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    file.write_text("\n".join(f"unknown_{number} = 1" for number in range(5000)))
    assert run_command(TrainerConfig, lambda _: 0, ["@", str(file)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: 5000 problems in the configuration:"
    assert said[-1] == "- and 4950 more"
    assert len(said) == 52


def test_links_that_lead_in_a_circle_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = tmp_path / "loop.toml"
    loop.symlink_to(loop)
    assert "symbolic links" in refusal(capsys, "@", str(loop))
    assert "symbolic links" in refusal(capsys, "--output-dir", str(loop / "outputs"))


def test_deltas_need_servers_that_fetch(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'weights is not valid: delta is for transport = "http"' in refusal(capsys, "--weights.delta", "true")


def test_files_that_inherit_from_each_other_without_end_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(30):
        (tmp_path / f"{number}.toml").write_text(f'toml_files = ["{number + 1}.toml", "{number + 1}.toml"]')
    assert "toml_files is nested too deep" in refusal(capsys, "@", str(tmp_path / "0.toml"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--env.args", DEEP_JSON], "env.0.args"),
        (["--env.args.x", DEEP_JSON], "env.0.args.x"),
        (["--env.args.x", "1" * 5000], "env.0.args.x"),
        (["--" + ".".join(["a"] * DEEP), "1"], f"a key has at most {MAX_DEPTH} parts"),
        (["--\udcff", "1"], "UTF-8"),
        (["--no-such-\u00e4", "1"], "unknown key"),
        (["--sampling.temperature", "inf"], "sampling.temperature must be a finite number"),
        (["--sampling.temperature", "nan"], "sampling.temperature must be a finite number"),
        (["--seq-len", str(10**18)], "seq_len must be <= 16777216"),
        (["--max-steps", str(10**30)], "max_steps"),
        (["--env-start-timeout-s", "1e308"], "env_start_timeout_s must be <= 1000000.0"),
        (["--client.base-url", "not a url"], "client.base_url"),
        (["--client.base-url", "file:///etc/passwd"], "client.base_url"),
        (["--client.base-url", "http://:80"], "client.base_url"),
        (["--client.base-url", "http://[::1"], "client.base_url"),
        (["--client.base-url", "http://a:99999"], "client.base_url"),
        (["--client.base-url", "http://user:hunter2@a/v1"], "must not hold a user and password"),
        (["--heartbeat.url", "mailto:me"], "heartbeat.url"),
        (["--rollout-transport.host", "a..b"], "rollout_transport.host"),
        (["--rollout-transport.host", "\u00fc" * 70], "rollout_transport.host"),
    ],
)
def test_a_flag_that_breaks_a_limit_is_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, *argv, kind=OrchestratorConfig)
    assert said.replace("env.0.", "env.") in message
    assert "hunter2" not in message


def test_a_variable_that_breaks_a_limit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "env.args" in refusal(capsys, kind=OrchestratorConfig, environ={"TRIVET_ENV__ARGS": DEEP_JSON})
    deep = {"TRIVET_" + "__".join(["A"] * DEEP): "1"}
    assert "parts" in refusal(capsys, kind=OrchestratorConfig, environ=deep)


@pytest.mark.parametrize("name", ["x" * 5000, "~nouser-of-this-machine/x", "a\0b", "\ud800"])
def test_a_name_that_can_be_no_path_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f"model.name = {json.dumps(name)}" if name.isprintable() or "\0" in name else "")
    flags = ["--model.name", name] if "\0" not in name else ["@", str(file)]
    assert "model.name" in refusal(capsys, *flags)
    assert "model.name" in refusal(capsys, *flags, "--model.lora.rank", "8")
    if "\0" not in name:
        assert "data.name" in refusal(capsys, "--data.name", f"{name}.jsonl", kind=SftConfig)


@pytest.mark.parametrize("row", [f'{{"messages": {DEEP_JSON}}}', f'{{"messages": [], "id": {"1" * 5000}}}'])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_data_that_python_cannot_read_is_refused_with_its_place(row: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(row if name == "rows.jsonl" else f"[{row}]")
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl, line 1, is not JSON" if name == "rows.jsonl" else r"rows\.json is not"
    ):
        open_source(str(file))


def run_process(*argv: str, program: str = "trivet.trainer.main", **environ: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", program, *argv], env=os.environ | environ, capture_output=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_a_key_beyond_ascii_is_refused_where_the_locale_has_only_ascii() -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = run_process("--\u00fcbung", "1", "--dry-run", **plain)
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"error: ")
    assert ended.stderr.count(b"\n") == 1


@pytest.mark.slow
def test_a_path_beyond_ascii_is_refused_where_the_locale_has_only_ascii(tmp_path: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = run_process("--output-dir", str(tmp_path / "\u00fc"), **plain)
    assert (ended.returncode, ended.stderr.count(b"\n")) == (2, 1)
    assert b"cannot be the path of a file here, where paths are read in ascii: unset PYTHONUTF8, or set LC_ALL" in ended.stderr
    file = tmp_path / "a.toml"
    file.write_text('output_dir = "\u00fc"', encoding="utf-8")
    ended = run_process("@", str(file), **plain)
    assert (ended.returncode, ended.stderr.count(b"\n")) == (2, 1)
    assert b"cannot be the path of a file here, where paths are read in ascii: unset PYTHONUTF8" in ended.stderr


def numeric_keys() -> list[str]:
    """Return every key of the commands that holds one number, at any depth."""
    kinds = (TrainerConfig, OrchestratorConfig, InferenceConfig, SftConfig, EvalConfig)
    return [f"{kind.__name__}/{'.'.join(path)}" for kind in kinds for path in _numbers(kind)]


def _numbers(kind: type[Section], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in kind.model_fields.items():
        kinds = set(get_args(field.annotation) or (field.annotation,)) - {type(None)}
        if kinds <= {int, float}:
            yield (*above, name)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _numbers(field.annotation, (*above, name))


def test_true_and_false_are_no_numbers_in_any_key() -> None:
    kinds = {kind.__name__: kind for kind in (TrainerConfig, OrchestratorConfig, InferenceConfig, SftConfig, EvalConfig)}
    keys = numeric_keys()
    assert len(keys) > 100
    for key in keys:
        kind, _, path = key.partition("/")
        value: object = True
        for part in reversed(path.split(".")):
            value = {part: value}
        with pytest.raises(ValidationError) as failed:
            kinds[kind].model_validate(value)
        assert {".".join(map(str, error["loc"])) for error in failed.value.errors()} >= {path}


@pytest.mark.parametrize("value", ["true", "[true]", "[5, false]"])
def test_a_boolean_is_no_number_in_a_list(value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f"steps = {value}\n")
    assert "steps" in refusal(capsys, "@", str(file), kind=EvalConfig)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le-bom"])
def test_a_file_with_a_byte_order_mark_is_read(encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "max_steps = 7  # caf\u00e9\r\n"
    data = codecs.BOM_UTF16_LE + text.encode("utf-16-le") if encoding.endswith("bom") else text.encode(encoding)
    (tmp_path / "a.toml").write_bytes(data)
    assert run_command(TrainerConfig, lambda _: 0, ["@", str(tmp_path / "a.toml"), "--dry-run"]) == 0
    assert "max_steps = 7" in capsys.readouterr().out


def test_a_file_in_another_encoding_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_bytes("max_steps = 7\n# caf\u00e9\n".encode("latin-1"))
    said = refusal(capsys, "@", str(tmp_path / "a.toml"))
    assert "line 2 is not text in UTF-8 (byte 0xe9); save the file in UTF-8" in said


@pytest.mark.slow
def test_a_dry_run_shows_a_path_beyond_ascii_on_an_output_of_ascii(tmp_path: Path) -> None:
    ended = run_process("--output-dir", str(tmp_path / "\u00fcbung"), "--dry-run", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"\\xfcbung" in ended.stdout


@pytest.mark.parametrize("name", ["../../x", "/abs", "a/../b", "a//b", "..", "x" * 200, "a\\b", "a\x1bb"])
def test_a_name_of_an_environment_that_leaves_the_results_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in (OrchestratorConfig, EvalConfig):
        for key in ("id", "name"):
            assert f"env.0.{key}" in refusal(capsys, f"--env.{key}", name, kind=kind)


def test_a_list_of_sections_without_a_default_is_set_key_by_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(OrchestratorConfig, lambda _: 0, ["--rollouts-per-example", "2", "--eval.env.id", "a", "--dry-run"]) == 0
    assert 'id = "a"' in capsys.readouterr().out
