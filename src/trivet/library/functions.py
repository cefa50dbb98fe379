"""Gives every function that a user passes an import path, by which the processes of the run find it."""

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trivet.errors import ConfigError
from trivet.library.main_source import MAIN, is_installed, source_of
from trivet.process.imports import is_in_a_file
from trivet.storage.durable import write_atomically

FOLDER = ".functions"
"""Below the output directory: a name with a dot does not count as a result of another run, and stays when the run is resumed."""
_WITH_REWARDS = '''"""An environment that is scored by functions of the program that started a run."""

from functools import partial

import verifiers as vf

from trivet.process.imports import import_by_path


def load_environment(**args):
    env = {make}(**args)
    env.rubric = vf.Rubric(funcs=[import_by_path(path) for path in {paths!r}], weights={weights!r})
    return env
'''


class FunctionFiles:
    """The import paths of a run's functions, and the files of those that no module has."""

    def __init__(self, output_dir: Path) -> None:
        self._folder = output_dir.absolute() / FOLDER
        self._sources: dict[Path, str] = {}

    def path_of(self, function: Callable[..., Any], *, argument: str) -> str:
        """Return the import path of `function`. A function of `__main__` has it once `write` has copied it into a file.

        Args:
            argument: the name under which the user passed it, for messages.

        Raises:
            ConfigError: no other process can find the function.
        """
        if not inspect.isfunction(function) or function.__qualname__ != function.__name__ or function.__name__ == "<lambda>":
            raise ConfigError(
                f"{argument} must be a function that is defined with def at the top level of a file or a cell, got {function!r}"
            )
        name = function.__name__
        if function.__module__ == MAIN:
            return self._add(name, source_of(function, argument=argument))
        module = sys.modules[function.__module__]
        if inspect.unwrap(getattr(module, name, None)) is not inspect.unwrap(function):  # type: ignore[arg-type]  # None is itself
            raise ConfigError(f"{argument}: module {module.__name__} has no function {name} that is {function!r}")
        file = getattr(module, "__file__", None)
        return f"{module.__name__}:{name}" if is_installed(module) or file is None else f"{Path(file).resolve()}:{name}"

    def with_rewards(self, environment: str, rewards: Sequence[str], *, weights: Sequence[float]) -> str:
        """Return the path of a function that loads `environment` and has it scored by `rewards` alone.

        Args:
            environment: an id, or the import path of a function.
            rewards: import paths of reward functions of verifiers.
            weights: one for each.
        """
        loader = "import_by_path({})" if is_in_a_file(environment) else "partial(vf.load_environment, {})"
        make = loader.format(repr(environment))
        return self._add("load_environment", _WITH_REWARDS.format(make=make, paths=list(rewards), weights=list(weights)))

    def write(self) -> None:
        """Write the files. Only their owner may read them: they may hold secrets, as the program does."""
        if self._sources:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o700)
        for file, source in self._sources.items():
            write_atomically(file, source.encode(), is_private=True)

    def _add(self, name: str, source: str) -> str:
        """Return the path of a function in a module that is named by its content, so that a resumed run keeps its own."""
        file = self._folder / f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:8]}.py"
        self._sources[file] = source
        return f"{file}:{name}"


def split_partial(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function behind `functools.partial`, and the keyword arguments that it fixes.

    Raises:
        ConfigError: it fixes positional arguments, which a configuration cannot name.
    """
    fixed: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        if function.args:
            raise ConfigError(f"{function!r} fixes arguments by position; fix them by name")
        fixed = {**function.keywords, **fixed}
        function = function.func
    return function, fixed
