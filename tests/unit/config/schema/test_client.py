import pytest
from pydantic import ValidationError

from trivet.config.schema.inference import ClientConfig

URLS = ["http://a:8000/v1", "http://b:8000/v1"]
ENVIRON = {"KEY_A": "a", "KEY_B": "b"}


def test_one_variable_holds_the_key_of_all_servers():
    config = ClientConfig(base_url=URLS, api_key_var=["KEY_A"])
    assert [config.api_key(url, ENVIRON) for url in URLS] == ["a", "a"]


def test_each_server_may_have_a_key_of_its_own_whatever_form_its_address_is_asked_in():
    config = ClientConfig(base_url=URLS, api_key_var=["KEY_A", "KEY_B"])
    assert [config.api_key(url, ENVIRON) for url in ("http://b:8000", "http://b:8000/v1/", URLS[0])] == ["b", "b", "a"]


def test_a_variable_that_is_not_set_means_no_key():
    assert ClientConfig().api_key("http://127.0.0.1:8000/v1", {}) is None


def test_a_number_of_keys_that_fits_no_reading_is_refused():
    with pytest.raises(ValidationError, match="api_key_var names 3 variables for 2 servers in base_url"):
        ClientConfig(base_url=URLS, api_key_var=["A", "B", "C"])


@pytest.mark.parametrize("again", ["http://a:8000/v1", "http://a:8000", "http://a:8000/v1/"])
def test_a_server_named_twice_is_refused(again):
    with pytest.raises(ValidationError, match="base_url names a server twice"):
        ClientConfig(base_url=["http://a:8000/v1", again])
