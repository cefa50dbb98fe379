from pathlib import Path

import pytest

from trivet.config.schema.evaluation import EvalClientConfig
from trivet.errors import ConfigError
from trivet.evaluation.endpoints import KEY_VARIABLE, Endpoint, choose_client, read_endpoints

ROOT = Path(__file__).parents[3]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "endpoints.py"
    path.write_text(text)
    return path


def test_the_file_of_this_project_is_read(monkeypatch):
    monkeypatch.setenv("PRIME_API_KEY", "secret")
    endpoints = read_endpoints(ROOT / "configs" / "endpoints.py")
    assert endpoints["Qwen/Qwen2.5-7B-Instruct"] == Endpoint(
        url="http://0.0.0.0:8007/v1", model="Qwen/Qwen2.5-7B-Instruct", key="local"
    )
    assert endpoints["openai"].key_variable == "OPENAI_API_KEY"
    default = endpoints["default"]
    assert (default.address, default.literal_key) == ("https://api.primeintellect.ai/v1", "secret")


def test_a_key_is_found_in_its_variable_or_handed_on_under_a_name_of_its_own(tmp_path):
    path = write(
        tmp_path,
        'ENDPOINTS = {"a": {"url": "http://a/v1", "key": "A_KEY", "model": "m"}, "b": {"base_url": "http://b", "api_key": "k"},'
        ' "c": {"url": "http://c", "api_key": None}}',
    )

    def chosen(name: str, environ: dict[str, str]):
        return choose_client(EvalClientConfig(endpoint=name, timeout=7), endpoints_path=path, environ=environ)

    client, endpoint = chosen("a", {"A_KEY": "x"})
    assert (client.base_url, client.timeout, endpoint.model) == (["http://a/v1"], 7, "m")
    assert client.access.api_key("http://a/v1", {"A_KEY": "x"}) == "x"
    client, endpoint = chosen("b", {})
    assert (endpoint.literal_key, client.api_key_var) == ("k", [KEY_VARIABLE])
    with pytest.raises(ConfigError, match=r"endpoint 'c' in .* has no api_key"):
        chosen("c", {"OPENAI_API_KEY": "of another service"})
    with pytest.raises(ConfigError, match=r"has its key in the variable A_KEY, which is not set"):
        chosen("a", {})
    with pytest.raises(ConfigError, match=r"client.endpoint \('d'\) is not in .*; there are: a, b, c"):
        chosen("d", {})


def test_without_a_name_no_file_is_read():
    client, endpoint = choose_client(EvalClientConfig(), endpoints_path=Path("nowhere.py"), environ={})
    assert (client.base_url, endpoint) == (["http://127.0.0.1:8000/v1"], None)


def test_what_the_file_prints_is_no_part_of_its_table(tmp_path):
    path = write(tmp_path, 'print("hello")\nENDPOINTS = {"a": {"url": "http://a"}}\n')
    assert list(read_endpoints(path)) == ["a"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('no')", "failed: RuntimeError: no"),
        ("import sys; sys.exit(0)", "failed: it exited with 0"),
        ("ENDPOINTS = [1]", "defines no table ENDPOINTS"),
        ("other = {}", "defines no table ENDPOINTS"),
        (
            'ENDPOINTS = {"a": "http://a"}',
            "endpoint 'a' in .*: Expected `object`, got `str`; it is a table of texts with `url`",
        ),
        ('ENDPOINTS = {"a": {"model": "m"}}', "endpoint 'a' in .* has no url"),
        ('ENDPOINTS = {"a": {"url": "http://a", "modle": "m"}}', "unknown field `modle`; .* known are model, url"),
        ('ENDPOINTS = {"a": {"url": 5}}', "Expected `str . null`, got `int` - at `..url`"),
        ("ENDPOINTS = {(", "failed: SyntaxError"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_what_is_wrong(tmp_path, text, said):
    with pytest.raises(ConfigError, match=rf"endpoints\.py.*{said}|{said}"):
        read_endpoints(write(tmp_path, text))


def test_a_file_that_hangs_or_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"endpoints\.py did not end within 0\.5 s"):
        read_endpoints(write(tmp_path, "import time; time.sleep(60)"), timeout_s=0.5)
    with pytest.raises(ConfigError, match=r"endpoints_path \(nowhere\.py\) is not a file"):
        read_endpoints(Path("nowhere.py"))
