"""Which package a word means, and which generation of the verifiers API it needs."""

from pathlib import Path

import pytest
from packaging.version import Version

from support.http_fake import serve
from support.packages import write_installed, write_source
from support.processes import find_free_port
from trivet.dependencies import InstalledPackages
from trivet.errors import ConfigError
from trivet.tools import environment_source
from trivet.tools.cli import main
from trivet.tools.environment_source import PackageSource, api_of, choose_source, inspect, require_on_hub
from trivet.tools.installer import choose_installer


def test_a_name_means_the_folder_first(tmp_path: Path) -> None:
    directory = write_source(tmp_path, "my-env")
    for word in ("my-env", "owner/my-env", str(directory)):
        source = choose_source(word, folder=tmp_path, is_index_allowed=False)
        assert source == PackageSource(words=("-e", str(directory)))


def test_the_owner_of_a_package_of_the_hub_is_kept_and_what_would_be_fetched_is_said(tmp_path: Path) -> None:
    source = choose_source("some-owner/chess==0.2", folder=tmp_path, is_index_allowed=False)
    assert source.describe() == "chess==0.2 from https://hub.primeintellect.ai/some-owner/simple/"
    assert source.index_words == ("--extra-index-url", "https://hub.primeintellect.ai/some-owner/simple/")


@pytest.mark.parametrize("word", ["my-env@0.1.0", "my_env==0.1.0", "owner/my-env@0.1.0"])
def test_a_name_with_a_version_means_the_same_folder(tmp_path: Path, word: str) -> None:
    directory = write_source(tmp_path, "my-env")
    source = choose_source(word, folder=tmp_path, is_index_allowed=False)
    assert source == PackageSource(words=("-e", str(directory)), version=Version("0.1.0"))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("owner/chess@0.2", "chess==0.2 from https://hub.primeintellect.ai/owner/simple/"),
        ("owner/chess@latest", "chess from https://hub.primeintellect.ai/owner/simple/"),
        ("chess@0.2", "chess==0.2"),
    ],
)
def test_a_version_is_asked_for_in_the_words_of_an_installer(tmp_path: Path, word: str, expected: str) -> None:
    assert choose_source(word, folder=tmp_path, is_index_allowed=True).describe() == expected


def test_a_folder_of_another_version_is_not_installed(tmp_path: Path) -> None:
    write_source(tmp_path, "my-env", version="0.1.0")
    source = choose_source("my-env@0.2.0", folder=tmp_path, is_index_allowed=False)
    with pytest.raises(ConfigError, match=r"is version 0\.1\.0 and not 0\.2\.0"):
        inspect(source, installer=choose_installer())


def test_an_unknown_name_is_downloaded_only_when_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'chess' is none of .* add --from-index"):
        choose_source("chess", folder=tmp_path, is_index_allowed=False)
    assert choose_source("chess>=1,<2", folder=tmp_path, is_index_allowed=True).words == ("chess>=1,<2",)


@pytest.mark.parametrize(
    ("what", "message"), [("./nothing", "no pyproject.toml"), ("a b", "neither a directory"), ("a/b/c", "neither")]
)
def test_what_cannot_be_installed_is_refused(tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_source(what, folder=tmp_path, is_index_allowed=True)


def test_a_wheel_is_installed_as_it_is(tmp_path: Path) -> None:
    wheel = tmp_path / "my_env-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert choose_source(str(wheel), folder=tmp_path, is_index_allowed=False).words == (str(wheel),)


@pytest.mark.parametrize(
    ("requirement", "text", "expected"),
    [
        ("verifiers>=0.4", "", "v1"),
        ("verifiers==0.4.1", "", "v1"),
        ("verifiers>=0.4.0.dev3", "", "v1"),
        ("verifiers==0.1.14", "", "v0"),
        ("verifiers>=0.1,<0.4", "import verifiers.v1 as v1", "v0"),
        ("verifiers", "import verifiers as vf", "v0"),
        ("verifiers", "import verifiers.v1 as vf", "v1"),
        ("verifiers>=0.3", "x = 1\nfrom verifiers.v1 import Taskset", "v1"),
        ("verifiers>=0.3", "from verifiers import Rubric, v1", "v1"),
        ("other>=0.4", "", "v0"),
    ],
)
def test_the_generation_comes_from_the_requirement_and_then_from_the_imports(
    tmp_path: Path, requirement: str, text: str, expected: str
) -> None:
    write_installed(tmp_path, "env", "1", requires=[requirement])
    package = InstalledPackages([str(tmp_path)]).find("env")
    assert package is not None
    assert api_of(package, ["", text]) == expected


def test_a_hub_that_cannot_be_reached_is_one_error_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = f"http://127.0.0.1:{find_free_port()}"
    monkeypatch.setattr(environment_source, "HUB", hub)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("TRIVET_VENVS", str(tmp_path / "venvs"))
    assert main(["env", "install", "some-owner/chess", "--path", str(tmp_path)]) == 2
    said = capsys.readouterr()
    [error] = said.err.splitlines()
    assert error.startswith(f"error: the environments hub cannot be reached at {hub}/some-owner/simple/ (")
    assert error.endswith("or install from a directory or a wheel: uv run trivet env install PATH")
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_only_a_package_that_its_owner_has_on_the_hub_reaches_an_installer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    asked: list[str] = []

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked.append(path)
        return (200, b"[]") if path.endswith("/some-owner/simple/chess-puzzles/") else (404, b"[]")

    with serve(answer) as url:
        index = f"{url}/some-owner/simple/"
        require_on_hub(PackageSource(words=("Chess_Puzzles==0.2",), index=index))
        with pytest.raises(ConfigError, match="has no package 'go', and nothing was changed; check owner and name"):
            require_on_hub(PackageSource(words=("go",), index=index))
    assert [path.partition("/some-owner/")[2] for path in asked] == ["simple/chess-puzzles/", "simple/go/"]


def test_a_package_of_no_hub_is_looked_for_nowhere() -> None:
    require_on_hub(PackageSource(words=("-e", "/environments/mine")))
