import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from support.processes import wait_until
from trivet.config.layout import COMMITTED
from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.schedulers import job
from trivet.schedulers.job import decide


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch):
    """A job changes variables and signal handlers of its process."""
    monkeypatch.setenv("JOB_RETRIED", "0")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def write_run(directory: Path) -> Path:
    file = directory / "rl.toml"
    file.write_text(f'output_dir = "{directory}"\n[orchestrator]\nrollouts_per_example = 4\n[[orchestrator.env]]\nid = "x"\n')
    return file


def commit(directory: Path, step: int) -> None:
    checkpoint = directory / "checkpoints" / f"step_{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / COMMITTED).write_text("{}")


def run_program(program: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a job whose command is a program of Python; return the exit code of the job."""
    monkeypatch.setattr(job, "module_command", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setattr(
        sys, "argv", ["job", "rl", str(write_run(directory)), "--pid-file", str(directory / "notes" / "17.pid")]
    )
    return job.main()


def test_the_first_start_takes_the_configuration_as_it_is_and_a_further_one_goes_on(tmp_path):
    file, pid_file = write_run(tmp_path), tmp_path / "17.pid"
    first = decide("rl", file, pid_file=pid_file)
    assert load_config(RLConfig, ["@", str(first)]).config == load_config(RLConfig, ["@", str(file)]).config
    assert os.environ["JOB_RETRIED"] == "0"
    commit(tmp_path, 4)
    again = decide("rl", file, pid_file=pid_file)
    assert load_config(RLConfig, ["@", str(again)]).config.trainer.ckpt.resume_step == -1
    assert os.environ["JOB_RETRIED"] == "1"


@pytest.mark.parametrize(
    ("program", "exit_code"),
    [("", 0), ("raise SystemExit(75)", 75), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_a_job_ends_as_its_command_and_may_be_started_again(tmp_path, monkeypatch, program, exit_code):
    for _ in range(2):
        assert run_program(program, tmp_path, monkeypatch) == exit_code
    assert not (tmp_path / "notes" / "17.pid").exists()


def test_the_process_id_is_that_of_a_process_which_passes_signals_on(tmp_path, monkeypatch):
    up, pid_file = tmp_path / "up", tmp_path / "notes" / "17.pid"
    program = f"import signal, sys, pathlib; signal.signal(15, lambda *_: sys.exit(5)); pathlib.Path({str(up)!r}).touch()"

    def send() -> None:
        wait_until(lambda: up.exists() and pid_file.exists(), timeout_s=20, waiting_for="the command")
        os.kill(int(pid_file.read_text()), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    assert run_program(f"{program}; signal.pause()", tmp_path, monkeypatch) == 5
    sender.join()


@pytest.mark.parametrize("exit_code", [2, 3])
def test_an_exit_code_that_every_start_would_repeat_ends_the_next_start_at_once(tmp_path, monkeypatch, capsys, exit_code):
    ran = tmp_path / "ran"
    program = f"open({str(ran)!r}, 'a').write('x'); raise SystemExit({exit_code})"
    for _ in range(2):
        assert run_program(program, tmp_path, monkeypatch) == exit_code
    assert ran.read_text() == "x"
    assert "which another start would repeat" in capsys.readouterr().err
    (tmp_path / "notes" / "17.final").unlink()  # as the message says
    assert run_program(program, tmp_path, monkeypatch) == exit_code
    assert ran.read_text() == "xx"


def test_a_configuration_that_cannot_be_read_is_final_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["job", "rl", str(tmp_path / "none.toml"), "--pid-file", str(tmp_path / "17.pid")])
    assert job.main() == 2
    assert "none.toml" in capsys.readouterr().err
    assert (tmp_path / "17.final").read_text() == "2\n"


def test_variables_that_set_keys_are_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIVET_SLURM__JOB_NAME", "x")
    program = "import os; raise SystemExit(any(name.startswith('TRIVET_SLURM') for name in os.environ))"
    assert run_program(program, tmp_path, monkeypatch) == 0
