import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trivet.config.layout import COMMITTED
from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.errors import NodesMissing
from trivet.schedulers import job
from trivet.schedulers.job import decide, run_first, run_other
from trivet.schedulers.starts import await_decision, decided_file, is_first_node, read_end, read_start


def run_beside_first(program: str, *, code: Path, decided: Path | None = None, end_timeout_s: float = 60.0) -> None:
    """Run a program of Python as the command of a node that is not the first."""
    decided = decided or code.with_suffix(".toml")
    run_other([sys.executable, "-c", program], decided=decided, code=code, start="a", end_timeout_s=end_timeout_s)


def commit(directory: Path, step: int) -> None:
    checkpoint = directory / "checkpoints" / f"step_{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / COMMITTED).write_text("{}")


def test_the_first_start_takes_the_configuration_as_it_is_and_a_further_one_goes_on(tmp_path):
    file, pid_file = tmp_path / "rl.toml", tmp_path / "17.pid"
    file.write_text(f'output_dir = "{tmp_path}"\n[orchestrator]\nrollouts_per_example = 4\n[[orchestrator.env]]\nid = "x"\n')
    first, again = decided_file(pid_file, {}), decided_file(pid_file, {"SLURM_RESTART_COUNT": "1"})
    decide("rl", file, pid_file=pid_file, decided=first, start="a")
    assert load_config(RLConfig, ["@", str(first)]).config == load_config(RLConfig, ["@", str(file)]).config
    commit(tmp_path, 4)
    decide("rl", file, pid_file=pid_file, decided=again, start="b")
    assert load_config(RLConfig, ["@", str(again)]).config.trainer.ckpt.resume_step == -1
    assert (read_start(first), read_start(again)) == ("a", "b")


def test_another_node_waits_for_what_the_first_decides(tmp_path):
    decided, waited = tmp_path / "17.0.toml", []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            decided.write_text("# start a\n")

    assert await_decision(decided, code=tmp_path / "17.0.code", sleep=sleep) == "a"
    assert len(waited) == 3


def test_another_node_does_not_wait_for_a_first_one_that_has_ended(tmp_path):
    code, waited = tmp_path / "17.0.code", list[float]()
    code.write_text("2\n")
    with pytest.raises(NodesMissing, match="the first node ended before it decided"):
        await_decision(tmp_path / "17.0.toml", code=code, sleep=waited.append)
    assert waited == []


def fail_to_list(monkeypatch: pytest.MonkeyPatch, directory: Path, *, until: Callable[[int], bool]) -> list[int]:
    """Have `directory` answer ESTALE until `until` is true of the count of its listings; return the list of these counts."""
    looks, listing = list[int](), Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path == directory:
            looks.append(len(looks) + 1)
            if not until(looks[-1]):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return listing(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    return looks


def test_a_directory_that_cannot_be_read_for_a_moment_ends_no_node(tmp_path, monkeypatch, capsys):
    (decided := tmp_path / "17.0.toml").touch()
    fail_to_list(monkeypatch, tmp_path, until=lambda look: look > 4)
    waited: list[float] = []
    await_decision(decided, code=tmp_path / "17.0.code", sleep=waited.append)
    assert waited
    fail_to_list(monkeypatch, tmp_path, until=lambda look: False)
    run_beside_first("", code=tmp_path / "17.0.code")
    assert capsys.readouterr().err == ""


def test_a_node_whose_command_runs_seldom_lists_the_directory(tmp_path, monkeypatch):
    looks = fail_to_list(monkeypatch, tmp_path, until=lambda look: True)
    run_beside_first("import time; time.sleep(1.2)", code=tmp_path / "17.0.code")
    assert len(looks) == 1


def test_a_first_node_that_decides_nothing_is_not_waited_for_without_end(tmp_path, monkeypatch, capsys):
    time_s = [0.0]

    def sleep(seconds: float) -> None:
        time_s[0] += 100  # each look at a directory that answers late takes long

    with pytest.raises(NodesMissing, match=r"did not write .*17\.0\.toml within 300 s"):
        await_decision(tmp_path / "17.0.toml", code=tmp_path / "17.0.code", clock=lambda: time_s[0], sleep=sleep)
    assert time_s == [300]
    monkeypatch.setattr("trivet.schedulers.starts._DECISION_TIMEOUT_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["job", "rl", str(tmp_path / "rl.toml"), "--pid-file", str(tmp_path / "17.pid")])
    for name, value, code in (
        ("SLURM_PROCID", "1", 0),
        ("JOBSET_NODE_BASE", "1", 75),
    ):  # of SLURM's tasks the highest code counts
        monkeypatch.setenv(name, value)
        for variable in ("JOBSET_JOB_INDEX", "JOB_COMPLETION_INDEX", "JOBSET_RESTARTS"):
            monkeypatch.setenv(variable, "0")
        with pytest.raises(SystemExit) as caught:
            job.main()
        assert caught.value.code == code
        assert "the first node of the job did not write" in capsys.readouterr().err


def test_what_becomes_of_another_node_is_not_the_job_s_exit_code(tmp_path, capsys):
    run_beside_first("raise SystemExit(75)", code=tmp_path / "17.0.code")
    assert "this node ended with exit code 75; the first node decides" in capsys.readouterr().err
    run_beside_first("", code=tmp_path / "17.0.code")
    assert capsys.readouterr().err == ""


def test_another_node_does_not_outlive_the_first_one_for_long(tmp_path, capsys):
    """A first node that fails before it leads the run tells nobody to end."""
    (code := tmp_path / "17.0.code").write_text("2\n")
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    run_beside_first(program, code=code, end_timeout_s=0.2)
    assert "this node killed by SIG" in capsys.readouterr().err


def test_a_decision_of_a_start_that_has_ended_is_waited_out(tmp_path):
    """SkyPilot may give a start the name of an earlier one, whose files stay until the first node begins."""
    decided, code = tmp_path / "17.0.toml", tmp_path / "17.0.code"
    decided.write_text("# start a\n")
    code.write_text("75 a\n")
    time_s = [0.0]

    def sleep(seconds: float) -> None:
        time_s[0] += seconds
        if time_s[0] == 20:
            decided.write_text("# start b\n")

    assert await_decision(decided, code=code, clock=lambda: time_s[0], sleep=sleep) == "b"
    assert time_s == [20]
    code.write_text("2 b\n")
    with pytest.raises(NodesMissing, match="the first node ended before this one began"):
        await_decision(decided, code=code, clock=lambda: time_s[0], sleep=sleep)
    assert time_s == [80]


REFUSED_ONCE = """
import pathlib, sys
decided, starts = map(pathlib.Path, sys.argv[1:])
old = decided.read_text()
starts.open("a").write(old)
decided.write_text("# start b\\n")
raise SystemExit(2 if old == "# start a\\n" else 75)
"""
"""The program of a node that reads the decision of start a. The first node of start b refuses it."""


def test_a_node_that_read_the_decision_of_an_earlier_start_is_run_again_with_the_new_one(tmp_path, capsys):
    (decided := tmp_path / "17.0.toml").write_text("# start a\n")
    code, starts = tmp_path / "17.0.code", tmp_path / "starts"
    run_other(
        [sys.executable, "-c", REFUSED_ONCE, str(decided), str(starts)], decided=decided, code=code, start="a", end_timeout_s=9
    )
    assert starts.read_text() == "# start a\n# start b\n"
    assert capsys.readouterr().err.count("this node ended with exit code 75") == 1


def test_a_node_that_is_refused_for_another_reason_is_not_run_again(tmp_path, capsys):
    (decided := tmp_path / "17.0.toml").write_text("# start a\n")
    run_beside_first("raise SystemExit(2)", code=tmp_path / "17.0.code", decided=decided, end_timeout_s=0.1)
    assert capsys.readouterr().err.count("this node ended with exit code 2") == 1


def test_the_end_of_an_earlier_start_ends_no_node(tmp_path):
    decided, code = tmp_path / "17.0.toml", tmp_path / "17.0.code"
    code.write_text("75 a\n")
    assert read_end(code, decided=decided) == 75
    decided.write_text("# start b\n")
    assert read_end(code, decided=decided) is None
    code.write_text("3 b\n")
    assert read_end(code, decided=decided) == 3


@pytest.mark.parametrize(
    ("program", "exit_code"),
    [("", 0), ("raise SystemExit(3)", 3), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_the_first_node_notes_the_exit_code_of_the_job(tmp_path, program, exit_code):
    code = tmp_path / "17.0.code"
    assert run_first([sys.executable, "-c", program], code=code, start="a") == exit_code
    assert code.read_text() == f"{exit_code} a\n"


def test_an_exit_code_that_cannot_be_noted_is_still_that_of_the_job(tmp_path, capsys):
    (tmp_path / "a_file").touch()
    assert run_first([sys.executable, "-c", "raise SystemExit(3)"], code=tmp_path / "a_file" / "17.0.code", start="a") == 3
    assert "exit code 3 was not noted" in capsys.readouterr().err


def test_the_first_of_several_nodes_decides_and_runs_the_command_beside_this_process(tmp_path, monkeypatch):
    file, pid_file = tmp_path / "rl.toml", tmp_path / "17.pid"
    file.write_text(
        f'output_dir = "{tmp_path}"\n[orchestrator]\nrollouts_per_example = 4\n[[orchestrator.env]]\nid = "x"\n'
        '[deployment]\ntype = "multi_node"\n'
    )
    ran: list[list[str]] = []
    monkeypatch.setattr(job, "run_first", lambda command, code, start: ran.append([*command, code.name]) or 3)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(sys, "argv", ["job", "rl", str(file), "--pid-file", str(pid_file)])
    with pytest.raises(SystemExit) as caught:
        job.main()
    assert caught.value.code == 3
    before = read_start(decided_file(pid_file, {}))
    with pytest.raises(SystemExit):
        job.main()
    assert before != read_start(decided_file(pid_file, {})) is not None
    del ran[1:]
    assert ran == [[sys.executable, "-P", "-m", "trivet.launcher.commands.rl", "@", str(tmp_path / "17.0.toml"), "17.0.code"]]
    assert pid_file.read_text() == f"{os.getpid()}\n"


def test_a_first_node_that_cannot_decide_says_so_to_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(sys, "argv", ["job", "rl", str(tmp_path / "none.toml"), "--pid-file", str(tmp_path / "17.pid")])
    with pytest.raises(SystemExit) as caught:
        job.main()
    code = tmp_path / "17.0.code"
    assert (caught.value.code, read_end(code, decided=tmp_path / "17.0.toml")) == (2, 2)
    assert "none.toml" in capsys.readouterr().err


def test_another_node_runs_the_command_beside_this_process_and_writes_no_process_id(tmp_path, monkeypatch):
    pid_file = tmp_path / "17.pid"
    decided_file(pid_file, {}).write_text("# start a\n")
    ran: list[list[str]] = []
    monkeypatch.setattr(job, "run_other", lambda command, decided, code, start: ran.append([*command, start]) or 0)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(sys, "argv", ["job", "rl", str(tmp_path / "rl.toml"), "--pid-file", str(pid_file)])
    job.main()
    assert ran == [[sys.executable, "-P", "-m", "trivet.launcher.commands.rl", "@", str(tmp_path / "17.0.toml"), "a"]]
    assert not pid_file.exists()


@pytest.mark.parametrize(
    ("rank", "ended", "does_watch"),
    [(1, 75, True), (3, 75, True), (4, 75, False), (1, 0, False), (1, -9, False)],
)
def test_a_node_that_missed_the_first_one_looks_after_a_job_whose_script_may_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, ended: int, does_watch: bool
) -> None:
    pid_file, watched = tmp_path / "17.pid", list[list[str]]()
    decided_file(pid_file, {}).write_text("# start a\n")
    monkeypatch.setattr(job, "run_other", lambda *_, **__: ended)
    monkeypatch.setattr(
        job, "replace_lost_script", lambda number, *, host, action, is_over: watched.append([number, host, action])
    )
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    for name, value in (("SLURM_PROCID", str(rank)), ("SLURM_JOB_ID", "17")):
        monkeypatch.setenv(name, value)
    words = ["--pid-file", str(pid_file), "--script-host", "node1", "--script-lost", "requeue"]
    monkeypatch.setattr(sys, "argv", ["job", "rl", str(tmp_path / "rl.toml"), *words])
    job.main()
    assert watched == ([["17", "node1", "requeue"]] if does_watch else [])


POD = {"JOBSET_NODE_BASE": "0", "JOBSET_JOB_INDEX": "0", "JOB_COMPLETION_INDEX": "0", "JOBSET_RESTARTS": "2"}


@pytest.mark.parametrize(
    ("environ", "is_first"),
    [
        ({}, True),
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "2"}, False),
        (POD, True),
        (POD | {"SLURM_PROCID": "2"}, True),
        (POD | {"JOB_COMPLETION_INDEX": "1"}, False),
        (POD | {"JOBSET_NODE_BASE": "2"}, False),
        (POD | {"JOBSET_NODE_BASE": "2", "JOBSET_JOB_INDEX": "1"}, False),
    ],
)
def test_one_node_of_a_job_decides(environ, is_first):
    assert is_first_node(environ) is is_first


def test_each_start_of_a_job_has_a_decision_of_its_own(tmp_path):
    file = tmp_path / "a-17.pid"
    assert decided_file(file, {"SLURM_RESTART_COUNT": "1"}).name == "a-17.1.toml"
    assert decided_file(file, POD).name == "a-17.2.toml"


def test_another_pod_becomes_the_command_whose_exit_code_counts(tmp_path, monkeypatch):
    pid_file = tmp_path / "kubernetes" / "a.pid"
    environ = POD | {"JOBSET_NODE_BASE": "1"}
    pid_file.parent.mkdir()
    decided_file(pid_file, environ).touch()
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: became.append(words))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["job", "rl", str(tmp_path / "rl.toml"), "--pid-file", str(pid_file)])
    job.main()
    assert became == [[sys.executable, "-P", "-m", "trivet.launcher.commands.rl", "@", str(pid_file.with_name("a.2.toml"))]]
    assert not pid_file.exists()


def test_the_command_takes_the_place_of_this_process_and_no_variable_changes_it(tmp_path, monkeypatch):
    file, pid_file = tmp_path / "sft.toml", tmp_path / "17.pid"
    file.write_text(f'output_dir = "{tmp_path}"\n')
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: became.append(words))
    monkeypatch.setenv("TRIVET_SLURM__PARTITION", "gpu")
    monkeypatch.setenv("TRIVET_VENVS", "/venvs")
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(sys, "argv", ["job", "sft", str(file), "--pid-file", str(pid_file)])
    job.main()
    assert pid_file.read_text() == f"{os.getpid()}\n"
    assert became == [[sys.executable, "-P", "-m", "trivet.launcher.commands.sft", "@", str(tmp_path / "17.0.toml")]]
    assert "TRIVET_SLURM__PARTITION" not in os.environ
    assert os.environ["TRIVET_VENVS"] == "/venvs"


@pytest.mark.parametrize(("noted", "expected"), [(2, 2), (3, 3), (75, None), (1, None)])
def test_a_start_that_heeds_a_final_code_ends_with_it(tmp_path: Path, monkeypatch, capsys, noted: int, expected: int | None):
    pid_file = tmp_path / "notes" / "run.pid"
    pid_file.parent.mkdir()
    (pid_file.parent / "run.0.code").write_text(f"{noted} abc\n")
    words = ["job", "rl", str(tmp_path / "absent.toml"), "--pid-file", str(pid_file), "--heed-final-code"]
    monkeypatch.setattr("sys.argv", words)
    for name in ("SLURM_PROCID", "SKYPILOT_NODE_RANK", "JOBSET_NODE_BASE", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        job.main()
    said = capsys.readouterr().err
    assert ended.value.code == (expected or 2)  # another start reads the configuration, which is not there
    assert ("would repeat" in said, "absent.toml" in said) == (expected is not None, expected is None)
