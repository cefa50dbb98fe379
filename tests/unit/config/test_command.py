import subprocess
import sys
from pathlib import Path

import pytest

from trivet.config.command import run_command
from trivet.config.load import load_config
from trivet.config.schema.base import Section
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.errors import ConfigError, Diverged, EnvironmentLoadError
from trivet.key_names import NAMES_VARIABLE, key_name


class Recorder:
    """A command's main function that records its configuration."""

    def __init__(self, result: int | Exception = 0) -> None:
        self.result = result
        self.configs: list[TrainerConfig] = []

    def __call__(self, config: TrainerConfig) -> int:
        self.configs.append(config)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_main_gets_the_configuration_and_its_result_is_the_exit_code() -> None:
    main = Recorder(7)
    assert run_command(TrainerConfig, main, ["--optim.lr", "0.5"]) == 7
    assert main.configs[0].optim.lr == 0.5


def test_a_bad_configuration_ends_with_2_before_main(capsys: pytest.CaptureFixture[str]) -> None:
    main = Recorder()
    assert run_command(TrainerConfig, main, ["--optim.lr", "x"]) == 2
    assert main.configs == []
    assert capsys.readouterr().err == 'error: optim.lr must be a number, got "x" (flag --optim.lr)\n'


def test_messages_name_keys_as_the_starter_of_the_process_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(NAMES_VARIABLE, '{"optim.lr": "args.learning_rate"}')
    assert run_command(TrainerConfig, Recorder(), ["--optim.lr", "x"]) == 2
    assert capsys.readouterr().err.startswith("error: args.learning_rate must be a number")

    def refuse(_config: TrainerConfig) -> int:
        raise ConfigError(f"{key_name('optim.lr')} is too large")

    assert run_command(TrainerConfig, refuse, []) == 2
    assert "args.learning_rate is too large" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(Diverged("loss is NaN"), 3), (ConfigError("no"), 2), (EnvironmentLoadError("no"), 2)]
)
def test_an_error_of_ours_ends_with_its_exit_code(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(TrainerConfig, Recorder(error), []) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_an_error_of_no_kind_of_ours_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(TrainerConfig, Recorder(ZeroDivisionError()), [])


def test_a_model_directory_that_is_not_there_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    main = Recorder()
    assert run_command(TrainerConfig, main, ["--model.name", "./nope"]) == 2
    assert main.configs == []
    assert "model.name (./nope) is not a directory" in capsys.readouterr().err


def test_a_dry_run_prints_what_loads_again_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = Recorder()
    assert run_command(TrainerConfig, main, ["--optim.lr", "0.5", "--dry-run"]) == 0
    assert main.configs == []
    printed = capsys.readouterr().out
    assert "lr = 0.5  # flag --optim.lr" in printed
    file = tmp_path / "printed.toml"
    file.write_text(printed)
    assert load_config(TrainerConfig, ["@", str(file)], environ={}).config.optim.lr == 0.5


def test_a_commands_own_check_comes_before_a_dry_run_too(capsys: pytest.CaptureFixture[str]) -> None:
    def check(config: TrainerConfig) -> None:
        raise EnvironmentLoadError(f"{config.model.name} is not what I need")

    assert run_command(TrainerConfig, Recorder(), ["--dry-run"], check=check) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is not what I need" in captured.err


def test_notices_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--orchestrator.group-size", "4", "--max-steps", "3"]
    assert run_command(RLConfig, lambda config: 0, argv) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("notice: orchestrator.group_size is called orchestrator.rollouts_per_example here")


def test_help_lists_every_key_and_needs_no_valid_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(EvalConfig, lambda config: 1, ["--help", "--nonsense"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: eval ")
    assert "weights_dir" in printed
    assert "[[env]]" in printed


def test_help_of_a_section_lists_its_keys_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(RLConfig, lambda config: 1, ["--help", "trainer.optim"]) == 0
    printed = capsys.readouterr().out
    assert '[trainer.optim] type = "adamw"' in printed
    assert "betas1" in printed
    assert "[trainer.model]" not in printed
    assert "[trainer.optim" not in printed.replace("[trainer.optim] type", "")
    assert run_command(RLConfig, lambda config: 1, ["--help", "trainer.optimizer"]) == 2
    assert "did you mean trainer.optim?" in capsys.readouterr().err


def test_a_dry_run_of_changes_prints_what_is_not_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--optim.lr", "0.5", "--wandb", "--scheduler.type", "cosine", "--max-steps", "3", "--seed", "42", "--dry-run"]
    assert run_command(TrainerConfig, Recorder(), [*argv, "--changed"]) == 0
    printed = capsys.readouterr().out
    assert "lr = 0.5  # flag --optim.lr" in printed
    assert "[wandb]" in printed
    assert "seed" not in printed
    assert "betas1" not in printed
    file = tmp_path / "changed.toml"
    file.write_text(printed)
    assert run_command(TrainerConfig, Recorder(), ["@", str(file), "--dry-run", "--changed"]) == 0
    assert [line.partition("  #")[0] for line in capsys.readouterr().out.splitlines()] == [
        line.partition("  #")[0] for line in printed.splitlines()
    ]
    assert run_command(TrainerConfig, Recorder(), ["--changed"]) == 2
    assert "add --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "content", "command"),
    [
        (RLConfig, 'model = "m"\n[env]\nid = "e"\n[trainer]\ngpus = 1\n[trainer.args]\nmax-steps = 3', "vf-rl"),
        (VfRLConfig, "[trainer.optim]\nlr = 1e-5\n[orchestrator]\nbatch_size = 8", "rl"),
        (RLConfig, '[data]\nname = "chats.jsonl"\n[optim]\nlr = 1e-5', "sft"),
    ],
)
def test_a_file_of_another_command_is_named_with_it(
    kind: type[Section], content: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content)
    assert run_command(kind, Recorder(), ["@", str(file)]) == 2
    assert (
        capsys.readouterr().err == f"error: {file} is a configuration of `{command}`; run it with: uv run {command} @ {file}\n"
    )


def test_a_command_without_arguments_that_it_needs_prints_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(RLConfig, Recorder(), []) == 2
    assert capsys.readouterr().err.startswith("usage: rl [@ file.toml ...]")


def test_a_command_imports_nothing_heavy_for_its_configuration() -> None:
    program = (
        "import sys, trivet.config.command; print({'torch', 'vllm', 'transformers', 'numpy', 'verifiers'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
