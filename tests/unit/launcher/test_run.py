import pytest

from trivet.config.schema.environment import EnvConfig
from trivet.config.schema.rl import RLConfig
from trivet.errors import EnvironmentLoadError
from trivet.key_names import names_to_variable
from trivet.launcher.processes import role_environment
from trivet.launcher.run import check


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
