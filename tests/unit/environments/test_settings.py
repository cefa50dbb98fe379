import pytest
from pydantic import ValidationError

from trivet.config.sections.client import ClientConfig
from trivet.config.sections.environment import CREDENTIALS, EnvConfig
from trivet.environments.settings import host_settings, worker_environment
from trivet.secret import SECRET_FILE

ENVIRON = dict.fromkeys((SECRET_FILE, *CREDENTIALS, "OPENAI_API_KEY", "PATH"), "value")


def test_credentials_of_the_run_are_withheld():
    assert worker_environment(ENVIRON).keys() == {"OPENAI_API_KEY", "PATH"}


def test_a_credential_is_kept_where_an_environment_asks_for_it_or_a_server_wants_it():
    env = EnvConfig(keep_variables=["WANDB_API_KEY"])
    settings = host_settings(env, model_name="m", client=ClientConfig(api_key_var=["HF_TOKEN"]))
    assert worker_environment(ENVIRON, settings=[settings]).keys() == {"OPENAI_API_KEY", "PATH", "WANDB_API_KEY", "HF_TOKEN"}


def test_the_secret_of_the_run_cannot_be_kept():
    with pytest.raises(ValidationError, match="keep_variables"):
        EnvConfig.model_validate({"keep_variables": [SECRET_FILE]})
    settings = host_settings(EnvConfig(), model_name="m", client=ClientConfig(api_key_var=[SECRET_FILE]))
    assert SECRET_FILE not in worker_environment(ENVIRON, settings=[settings])


def test_workers_of_two_environments_are_shared_only_where_they_get_the_same_variables():
    assert EnvConfig(keep_variables=["HF_TOKEN"]).program != EnvConfig().program
