"""Test how a worker's process is ended and described, with virtual time and a stand-in process."""

import asyncio
from pathlib import Path

import pytest

from support.stand_in_process import StandInProcess
from support.virtual_time import run_virtually
from trivet.environments.workers.process import WorkerProcess
from trivet.environments.workers.worker_log import WorkerLog
from trivet.process.stacks import STACKS_SIGNAL, STACKS_WITHIN_S


def make(log: Path = Path("log"), *, log_offset: int = 0) -> tuple[StandInProcess, WorkerProcess]:
    stand_in = StandInProcess()
    process = WorkerProcess(stand_in, log=WorkerLog(log), log_offset=log_offset, end_session=stand_in.end_session)  # type: ignore[arg-type]  # acts as one
    return stand_in, process


def test_a_process_that_is_killed_first_has_time_to_write_its_stacks():
    async def scenario() -> None:
        stand_in, process = make()
        await process.kill("was ended because it was blocked")
        assert stand_in.history == [(0.0, STACKS_SIGNAL), (STACKS_WITHIN_S, "killed")]
        assert not process.is_running
        assert process.describe_end() == "was ended because it was blocked"

    run_virtually(scenario(), limit_s=10)


def test_a_process_that_does_not_end_by_itself_is_ended_after_the_time():
    async def scenario() -> None:
        stand_in, process = make()
        asyncio.get_running_loop().call_later(3.0, stand_in.exit, 0)
        await process.wait_or_end(timeout_s=5.0)
        assert (stand_in.history, process.describe_end()) == ([], "ended with exit code 0")
        stand_in, process = make()
        await process.wait_or_end(timeout_s=5.0)
        assert stand_in.history == [(8.0, "killed")]

    run_virtually(scenario(), limit_s=20)


@pytest.mark.parametrize(
    ("code", "said"), [(None, "is still running"), (7, "ended with exit code 7"), (-9, "was killed by SIGKILL")]
)
def test_an_end_is_described(code: int | None, said: str):
    async def scenario() -> None:
        stand_in, process = make()
        stand_in.returncode = code
        assert process.describe_end() == said
        process.end("sent what is not an answer")
        process.end()
        assert process.describe_end() == "sent what is not an answer"

    run_virtually(scenario(), limit_s=1)


def test_only_the_last_lines_of_its_own_output_are_quoted(tmp_path: Path):
    async def scenario() -> None:
        log = tmp_path / "log"
        log.write_text("earlier\n")
        _, process = make(log, log_offset=8)
        assert process.last_lines() == ""
        with log.open("a") as file:
            file.write("".join(f"line {number}\n" for number in range(30)))
        assert process.last_lines().splitlines() == [
            f" Last lines of {log}:",
            *(f"  line {number}" for number in range(10, 30)),
        ]

    run_virtually(scenario(), limit_s=1)
