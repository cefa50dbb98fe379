"""A real bash completes the tools, their options, and the keys of configurations."""

import shutil
import subprocess
from pathlib import Path

import pytest

from trivet.cli.completion import key_parser
from trivet.cli.main import main
from trivet.config.reference import EXAMPLES

_COMPLETE = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
$(complete -p {command} | grep -o -- '-F [^ ]*' | cut -d' ' -f2) {command}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def write_script(path: Path, shell: str) -> Path:
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", shell]) == 0
    return path


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script(tmp_path_factory.mktemp("completion") / "trivet.bash", "bash")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("trivet sta", {"status"}),
        ("trivet check --js", {"--json"}),
        ("trivet env li", {"list"}),
        ("rl --trainer.optim.l", {"--trainer.optim.lr"}),
        ("sft --optim.weight-", {"--optim.weight-decay"}),
        ("rl --detectors.truncated s", {"stop"}),
    ],
)
def test_a_tab_completes(script: Path, words: str, found: set[str]) -> None:
    program = _COMPLETE.format(script=script, words=words, command=words.split()[0])
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == found, done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_a_sourced_script_completes_in_zsh(tmp_path: Path) -> None:
    path = write_script(tmp_path / "trivet.zsh", "zsh")
    program = f"autoload -U compinit; compinit -D; source {path}; print $_comps[trivet] $_comps[rl]"
    done = subprocess.run(["zsh", "-f", "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["_shtab_trivet", "_shtab_rl"], "")


@pytest.mark.parametrize(("kind", "command"), [(kind, command) for kind, (command, _) in EXAMPLES.items()])
def test_every_command_with_a_configuration_has_its_keys(kind, command: str) -> None:
    assert "--output-dir" in key_parser(kind, command).format_help() or command == "vf-rl"
