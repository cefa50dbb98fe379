"""Which release of verifiers is installed, and whether it can be run."""

import importlib.metadata
import subprocess
import sys

import pytest

from trivet.environments.apis.load import require_release
from trivet.errors import EnvironmentLoadError


def pretend(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


@pytest.mark.parametrize(("version", "release"), [("0.3.1", (0, 3)), ("0.3.0.post2", (0, 3)), ("0.4.0rc1", (0, 4))])
def test_the_release_is_major_and_minor(version: str, release: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(version, monkeypatch)
    assert require_release("toy") == release


def test_a_missing_verifiers_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(None, monkeypatch)
    with pytest.raises(EnvironmentLoadError, match=r"'toy' needs verifiers, which is not installed.*trivet env install toy"):
        require_release("toy")


@pytest.mark.parametrize("version", ["0.1.14", "0.2.1", "0+unknown"])
def test_an_older_verifiers_is_refused_with_the_one_needed(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(version, monkeypatch)
    with pytest.raises(EnvironmentLoadError) as refused:
        require_release("toy")
    assert f"verifiers {version}" in str(refused.value)
    assert "install verifiers 0.3" in str(refused.value)


def test_choosing_an_adapter_imports_nothing_that_a_worker_may_lack() -> None:
    """The worker's distribution has msgspec and numpy; everything else comes with verifiers."""
    program = (
        "import trivet.environments.apis.load, trivet.environments.apis.reward_guard, sys\n"
        "absent = ('pydantic', 'httpx', 'openai', 'verifiers', 'transformers', 'torch')\n"
        "sys.exit(', '.join(name for name in absent if name in sys.modules) or None)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
