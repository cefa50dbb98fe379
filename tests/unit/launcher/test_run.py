from pathlib import Path

import msgspec
import pytest

from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EnvConfig
from trivet.config.schema.rl import RLConfig
from trivet.errors import EnvironmentLoadError, NodesMissing, RunDirectoryBusy, TrivetError
from trivet.key_names import names_to_variable
from trivet.launcher.nodes.lease import HeadLease, Lease
from trivet.launcher.processes import role_environment
from trivet.launcher.run import check, lock_wait
from trivet.launcher.run_directory import RunDirectory


def test_a_missing_environment_is_refused_with_the_command_that_installs_it() -> None:
    env = EnvConfig(id="owner/not-there")
    config = RLConfig.model_validate({"orchestrator": {"env": [env.model_dump()]}})
    with pytest.raises(EnvironmentLoadError, match="install it with: uv run trivet env install owner/not-there"):
        check(config)


def test_roles_do_not_inherit_keys_that_their_files_already_hold() -> None:
    assert role_environment({"TRIVET_WANDB__PROJECT": "p", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_roles_name_keys_as_the_launcher_does() -> None:
    variable = names_to_variable({"seq_len": "trainer.args.max_seq_len"})
    assert role_environment(variable) == variable


class Contender:
    """A first node that waits for another one's lock. The holder of the lock renews the lease or does not."""

    def __init__(self, layout: RunLayout, *, is_renewed: bool, is_retried: bool = False) -> None:
        self.layout = layout
        self.now = 0.0
        self._is_renewed = is_renewed
        self.write_lease()
        self.lease = HeadLease(
            layout.lease, lost_after_s=30.0, is_retried=is_retried, clock=lambda: self.now, sleep=self.pass_time
        )
        wait = lock_wait(RLConfig(), self.lease, environ={})
        self.directory = RunDirectory(layout, wait=wait)
        self.directory._lock._clock, self.directory._lock._sleep = lambda: self.now, self.pass_time

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self._is_renewed:
            self.write_lease()

    def write_lease(self) -> None:
        lease = Lease(term=1, holder="another", node="host-b", number=int(self.now))
        self.layout.lease.write_bytes(msgspec.json.encode(lease))


@pytest.mark.parametrize(
    ("is_renewed", "is_retried", "error", "exit_code"),
    [
        pytest.param(False, False, NodesMissing, 75, id="the lock of a machine that died"),
        pytest.param(True, False, RunDirectoryBusy, 2, id="a first node that leads"),
        pytest.param(True, True, RunDirectoryBusy, 75, id="a job that was started again while its earlier start leads"),
    ],
)
def test_a_first_node_tells_a_lock_that_is_kept_for_a_dead_machine_from_a_leader(
    tmp_path: Path, is_renewed: bool, is_retried: bool, error: type[TrivetError], exit_code: int
) -> None:
    layout = RunLayout(tmp_path)
    with RunDirectory(layout):
        contender = Contender(layout, is_renewed=is_renewed, is_retried=is_retried)
        with pytest.raises(error) as raised:
            contender.directory.__enter__()
    assert raised.value.exit_code == exit_code
    assert (contender.now < 5.0) if is_renewed else (120.0 <= contender.now < 125.0)


def test_the_time_for_which_the_lock_is_waited_for_counts_for_the_lease_too(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    dead = RunDirectory(layout)
    dead.__enter__()
    contender = Contender(layout, is_renewed=False)
    pass_time = contender.pass_time

    def forget_the_dead(seconds: float) -> None:
        pass_time(seconds)
        if contender.now >= 90.0:
            dead.close()

    contender.directory._lock._sleep = forget_the_dead
    with contender.directory, contender.lease:
        assert 90.0 <= contender.now < 95.0
