"""trivet-worker holds what a worker imports, no more and no less, and needs msgspec and numpy alone."""

import subprocess
import sys
import tomllib

from support.import_closure import SOURCE, closure, file_of

ENTRY = "trivet.environments.workers.main"
ADAPTERS = "trivet.environments.apis."
BY_NAME = "trivet.environments.apis.v0.text_games"
"""What environments import by its name; no module of a worker does."""
OWN_PYTHON = "environments/apis/v0/reward_functions.py"
"""Runs only in trivet's own Python, and lies beside what other workers need."""
BLOCKED = (
    *("torch", "vllm", "pydantic", "zmq", "transformers", "httpx", "openai", "rich", "datasets", "xxhash"),
    *("safetensors", "tokenizers", "verifiers", "packaging", "tomli_w", "wandb", "prometheus_client"),
)


def included() -> set[str]:
    """Return the files of trivet in the distribution, by their path below src/trivet."""
    table = tomllib.loads((SOURCE / "worker_distribution" / "pyproject.toml").read_text())
    pairs = table["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    files: set[str] = set()
    for source, target in pairs.items():
        assert target == source.replace("../", "trivet/", 1)
        path = (SOURCE / "worker_distribution" / source).resolve()
        found = path.rglob("*.py") if path.is_dir() else [path]
        files |= {str(file.relative_to(SOURCE)) for file in found}
    return files


def test_the_distribution_holds_what_a_worker_imports() -> None:
    needed = {str(file.relative_to(SOURCE)) for module in closure((ENTRY, BY_NAME)) if (file := file_of(module)) is not None}
    assert included() - {OWN_PYTHON} == needed


def test_nothing_but_an_adapter_imports_what_the_distribution_does_not_require() -> None:
    others = {
        module: sorted(names - set(sys.stdlib_module_names) - {"msgspec", "numpy"})
        for module, names in closure((ENTRY,)).items()
        if not module.startswith(ADAPTERS)
    }
    assert {module: names for module, names in others.items() if names} == {}


def test_a_worker_starts_without_any_other_package() -> None:
    program = (
        f"import sys\nfor name in {BLOCKED!r}: sys.modules[name] = None\n"
        f"import {ENTRY}, trivet.environments.apis\n"
        "print(*sorted(name for name in sys.modules if name.startswith('trivet')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = {str(file.relative_to(SOURCE)) for name in done.stdout.split() if (file := file_of(name)) is not None}
    assert files <= included()
