"""Imports what a user names by its path, makes the import of large libraries faster, and keeps libraries out of the logs."""

import gc
import hashlib
import importlib
import importlib.util
import logging
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_IN_A_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)")
NOISY_LOGGERS = (
    *("httpx", "httpx2", "httpcore", "openai", "urllib3", "filelock", "datasets", "huggingface_hub", "asyncio", "fsspec"),
    *("wandb", "aiohttp.access", "mcp", "verifiers.v1"),
)
"""Libraries that log every request or file at INFO."""


def quiet_noisy_loggers() -> None:
    """Let them log warnings and errors alone, or less where the root logger is set to less."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries in the block: without garbage collection, and with Ctrl-C ending the process without a traceback.

    For imports alone: what runs within the block, and what is forked from it, is without collections. An import makes hundreds of
    thousands of objects, and nearly all of them stay. The collector looks through them again and again: vLLM's API server took
    11.2 s of CPU to import with it and 8.4 s without, an environment's worker 3.8 s and 3.1 s.
    """
    was_enabled = gc.isenabled()
    handler = signal.getsignal(signal.SIGINT)
    is_quiet = handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    gc.disable()
    if is_quiet:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if is_quiet:
            signal.signal(signal.SIGINT, handler)


def file_of(path: str) -> Path | None:
    """Return the file of `path/to/file.py:name`, or None for a path of another form."""
    found = _IN_A_FILE.fullmatch(path)
    return Path(found["file"]) if found is not None else None


def import_by_path(path: str) -> Any:
    """Return the attribute that `path` names: `package.module.name`, `package.module:name` or `path/to/file.py:name`.

    Raises:
        ValueError: `path` names no module.
        ImportError: the module cannot be imported; its own code may raise anything else.
        AttributeError: the module has no such attribute.
    """
    if (file := file_of(path)) is not None:
        return getattr(import_file(file), path.rpartition(":")[2])
    module, _, name = path.replace(":", ".").rpartition(".")
    return getattr(importlib.import_module(module), name)


def import_file(file: Path) -> ModuleType:
    """Import a Python file, once for each process: as a module of its package, or alone under a name that no other module has.

    The folder of the file, or the one that holds its package, becomes the last in which modules are searched: nothing in it can
    stand in for an installed package.

    Raises:
        ImportError: there is no such file, or its package has the name of another one; its own code may raise anything else.
    """
    file = file.resolve()
    if not file.is_file():
        raise ImportError(f"there is no file {file}")
    folder, package = file.parent, list[str]()
    while (folder / "__init__.py").is_file():
        package.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    if package:  # by its name there its relative imports work
        module = importlib.import_module(".".join(package if file.stem == "__init__" else [*package, file.stem]))
        if module.__file__ is None or Path(module.__file__).resolve() != file:
            raise ImportError(
                f"{file} is of a package {package[0]!r}, and {module.__file__} is another of that name; rename one"
            )
        return module
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None, "a spec that is made for a file has a loader"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
