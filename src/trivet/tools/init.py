"""`trivet init DIR`: a workspace, the example configurations in both dialects, endpoints, and a place for environments."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from trivet.errors import ConfigError

ENVIRONMENTS = ("alphabet-sort", "gsm8k", "math-python", "reverse-text", "wiki-search", "wordle")

_TEMPLATES = Path(__file__).with_name("templates")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="where the workspace is made; new, or without files of these names"
    )


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        ConfigError: a file of the workspace exists already.
    """
    directory: Path = arguments.directory
    write_workspace(directory)
    print(f"workspace in {directory}: configs/, environments/, README.md")
    print(f"next: cd {directory} && uv run vf-rl @ configs/vf-rl/reverse-text.toml --dry-run")
    return 0


def write_workspace(directory: Path) -> None:
    """All files, or none.

    Raises:
        ConfigError: one exists already, or the directory cannot be written.
    """
    files = workspace_files()
    if present := sorted(name for name in files if (directory / name).exists()):
        raise ConfigError(
            f"{directory} has {', '.join(present)} already, and nothing of it is written over; choose another directory, or "
            "move these away"
        )
    try:
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    except OSError as exc:
        raise ConfigError(f"{directory} cannot be written: {exc.strerror}; choose another directory") from exc


def workspace_files() -> Mapping[str, str]:
    """Content by name relative to the workspace."""
    examples = example_configs()
    files = {
        "README.md": (_TEMPLATES / "workspace_readme.md").read_text(),
        "environments/AGENTS.md": (_TEMPLATES / "environments_guide.md").read_text(),
        "configs/endpoints.py": (examples / "endpoints.py").read_text(),
    }
    for name in ENVIRONMENTS:
        files[f"configs/vf-rl/{name}.toml"] = (examples / "vf-rl" / f"{name}.toml").read_text()
        files[f"configs/rl/{name}.toml"] = (examples / name.replace("-", "_") / "rl.toml").read_text()
    return files


def example_configs() -> Path:
    """The configurations of this checkout; those that the wheel carries where there is none."""
    package = Path(__file__).parents[1]
    packaged = package / "example_configs"
    return packaged if packaged.is_dir() else package.parents[1] / "configs"
