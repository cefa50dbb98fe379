import pytest
from pydantic import ValidationError

from trivet.config.schema.environment import EnvConfig
from trivet.config.schema.inference import ClientConfig
from trivet.environments.settings import host_settings, worker_environment
from trivet.secret import SECRET_FILE

WITHHELD = (SECRET_FILE, "WANDB_API_KEY", "HF_TOKEN", "JUDGE_API_KEY", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY")
ENVIRON = dict.fromkeys((*WITHHELD, "OPENAI_API_KEY", "PATH", "TOKENIZERS_PARALLELISM"), "value")


def test_variables_whose_name_is_that_of_a_secret_are_withheld():
    assert worker_environment(ENVIRON).keys() == {"PATH", "TOKENIZERS_PARALLELISM"}


def test_a_secret_is_given_where_an_environment_asks_for_it_or_a_server_wants_it():
    env = EnvConfig.model_validate({"env_vars": ["JUDGE_API_KEY"]})
    settings = host_settings(env, model_name="m", client=ClientConfig(api_key_var=["HF_TOKEN"]))
    assert worker_environment(ENVIRON, settings=settings).keys() - {
        "PATH",
        "TOKENIZERS_PARALLELISM",
    } == {"JUDGE_API_KEY", "HF_TOKEN"}


def test_the_secret_of_the_run_cannot_be_kept():
    with pytest.raises(ValidationError, match="env_vars"):
        EnvConfig.model_validate({"env_vars": [SECRET_FILE]})
    settings = host_settings(EnvConfig(), model_name="m", client=ClientConfig(api_key_var=[SECRET_FILE]))
    assert SECRET_FILE not in worker_environment(ENVIRON, settings=settings)


def test_workers_of_two_environments_are_shared_only_where_they_get_the_same_variables():
    assert EnvConfig(env_vars=["HF_TOKEN"]).program != EnvConfig().program
