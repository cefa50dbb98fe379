"""Loads scripts and test programs, which belong to no package, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load_script(name: str) -> ModuleType:
    """Load a script of `scripts/`. It finds the modules beside it, as it does when it is run."""
    path = SCRIPTS / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return load_module(path)


def load_module(path: Path) -> ModuleType:
    """Load the file. Afterwards it can be imported under its name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
