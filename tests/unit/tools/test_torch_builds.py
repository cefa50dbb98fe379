import pytest

from trivet.errors import ConfigError
from trivet.tools.torch_builds import mismatched_companions, require_matching_companions


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torch": "2.13.0+cpu"}, []),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.13.0+cpu"}, ["torchvision"]),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, []),
        ({}, []),
    ],
)
def test_only_cuda_builds_beside_a_cpu_build_are_named(versions: dict[str, str], expected: list[str]) -> None:
    assert mismatched_companions(versions) == expected


def test_the_refusal_says_how_to_remove_them() -> None:
    with pytest.raises(ConfigError, match=r"torchvision 0\.28\.0 cannot be imported .*: pip uninstall --yes torchvision$"):
        require_matching_companions({"torch": "2.13.0+cpu", "torchvision": "0.28.0"})
