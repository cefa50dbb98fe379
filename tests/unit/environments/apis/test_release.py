"""Which release of verifiers is installed, and whether it can be run."""

import importlib.metadata
import subprocess
import sys

import pytest

from trivet.environments.apis import release
from trivet.environments.apis.release import parse_release, require_release
from trivet.errors import EnvironmentLoadError


def pretend(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(release.importlib.metadata, "version", find)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.3.1", (0, 3, 1)), ("0.1.9.post3", (0, 1, 9)), ("0.1.14", (0, 1, 14)), ("0.4.0rc1", (0, 4, 0))],
)
def test_the_numbers_of_a_version_are_read_and_its_suffix_is_left_out(version: str, numbers: tuple[int, int, int]) -> None:
    assert parse_release(version) == numbers


def test_a_missing_and_a_too_old_verifiers_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(None, monkeypatch)
    with pytest.raises(EnvironmentLoadError, match=r"'toy' needs verifiers, which is not installed.*trivet env install toy"):
        require_release("toy")
    pretend("0.1.1", monkeypatch)
    with pytest.raises(EnvironmentLoadError, match=r"'toy' runs with verifiers 0\.1\.1.*allow verifiers 0\.1\.2 or newer"):
        require_release("toy")
    pretend("0+unknown", monkeypatch)
    with pytest.raises(EnvironmentLoadError, match=r"'0\+unknown', which is not a release"):
        require_release("toy")
    pretend("0.1.2", monkeypatch)
    assert require_release("toy") == (0, 1, 2)


def test_choosing_an_adapter_imports_nothing_that_a_worker_may_lack() -> None:
    """The worker's distribution has msgspec and numpy; everything else comes with verifiers."""
    program = (
        "import trivet.environments.apis, trivet.environments.apis.loading, trivet.environments.apis.reward_guard, sys\n"
        "absent = ('pydantic', 'httpx', 'openai', 'verifiers', 'transformers', 'torch')\n"
        "sys.exit(', '.join(name for name in absent if name in sys.modules) or None)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
