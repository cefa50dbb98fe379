"""Gives every function that a user passes an import path, by which the processes of the run can import it.

The path of a module's function contains the module's name or file. A function of `__main__` (a script or a notebook) is pickled
into a file of its own, which only processes of the same user may read.
"""

import functools
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from trivet.errors import ConfigError
from trivet.process.imports import file_of
from trivet.storage.durable import write_atomically

FOLDER = ".functions"
"""The folder of these files in the output directory. The dot keeps it from counting as a result of an earlier run."""
_MAIN = "__main__"
_INSTALLED_FOLDERS = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
"""Folders whose modules every process of this interpreter can import by name."""
# The text of a module with a pickled function.
_PICKLED = '''"""A function of the program that started a run, as it was at that moment. Only processes of the same user read it."""

import pickle
import sys

sys.path.extend(folder for folder in {folders!r} if folder not in sys.path)
{name} = pickle.loads({pickled!r})
'''
# The text of a module that loads an environment and replaces its reward functions.
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
    """Makes the import paths of a run's functions, and the files of the functions that are in no importable module."""

    def __init__(self, output_dir: Path) -> None:
        self._folder = output_dir.absolute() / FOLDER
        self._sources: dict[Path, str] = {}
        """The text of each file that `write` will write."""

    def path_of(self, function: Callable[..., Any], *, argument: str) -> str:
        """Return the import path of `function`. For a function of `__main__` the path is valid once `write` was called.

        Raises a ConfigError, which names the user's `argument`, if no other process can import the function.
        """
        if not inspect.isfunction(function) or function.__qualname__ != function.__name__ or function.__name__ == "<lambda>":
            raise ConfigError(
                f"{argument} must be a function that is defined with def at the top level of a file or a cell, got {function!r}"
            )
        name = function.__name__
        if function.__module__ == _MAIN:
            return self._add(name, _pickle(function, argument=argument), identity=_identity(function))
        module = sys.modules[function.__module__]
        if inspect.unwrap(getattr(module, name, None)) is not inspect.unwrap(function):  # type: ignore[arg-type]  # unwrap returns None for None
            raise ConfigError(f"{argument}: module {module.__name__} has no function {name} that is {function!r}")
        file = getattr(module, "__file__", None)
        if file is None or not _INSTALLED_FOLDERS.isdisjoint(Path(file).resolve().parents):
            return f"{module.__name__}:{name}"
        return f"{Path(file).resolve()}:{name}"

    def with_rewards(self, environment: str, rewards: Sequence[str], *, weights: Sequence[float]) -> str:
        """Return the import path of a function that loads an environment and replaces its reward functions.

        Args:
            environment: an id or an import path.
            rewards: the import paths of the reward functions.
            weights: the weight of each of them.
        """
        loader = "import_by_path({})" if file_of(environment) is not None else "partial(vf.load_environment, {})"
        make = loader.format(repr(environment))
        source = _WITH_REWARDS.format(make=make, paths=list(rewards), weights=list(weights))
        return self._add("load_environment", source, identity=source)

    def write(self) -> None:
        """Write the files. Only their owner may read them, because they may contain secrets of the program."""
        if self._sources:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o700)
        for file, source in self._sources.items():
            write_atomically(file, source.encode(), is_private=True)

    def _add(self, name: str, source: str, *, identity: str) -> str:
        """Add a file with the function `name`; return its import path. Equal identities give equal names, also in a resumed run."""
        file = self._folder / f"{name}_{hashlib.sha256(identity.encode()).hexdigest()[:8]}.py"
        self._sources[file] = source
        return f"{file}:{name}"


def split_partial(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function inside `functools.partial` objects, and their keyword arguments. Positional ones are a ConfigError."""
    fixed: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        if function.args:
            raise ConfigError(f"{function!r} fixes arguments by position; fix them by name")
        fixed = {**function.keywords, **fixed}
        function = function.func
    return function, fixed


def _pickle(function: FunctionType, *, argument: str) -> str:
    """Return the source of a module that contains `function` and everything in `__main__` that it uses, pickled."""
    import cloudpickle  # here: most runs pass functions of modules, or none

    try:
        pickled = cloudpickle.dumps(function)
    except Exception as exc:  # objects that the function uses may raise anything when they are pickled
        raise ConfigError(
            f"{argument} uses a value that other processes cannot have: {exc}; make it inside the function, or move it with the "
            "function into a file of its own, and import that"
        ) from exc
    folders = [str(Path(folder).absolute()) for folder in sys.path]
    return _PICKLED.format(folders=folders, name=function.__name__, pickled=pickled)


def _identity(function: FunctionType) -> str:
    """Return a text that identifies what a function of `__main__` computes: its code, and what it uses of `__main__`.

    Unlike pickled bytes, the text stays the same in another process and if the function moves to another line.
    """
    parts: dict[str, str] = {}

    def visit(name: str, value: object) -> None:
        """Add the text of a function, class or value of `__main__` to `parts`, and of everything that it uses."""
        if name in parts:
            return
        parts[name] = ""
        value = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, FunctionType) and value.__module__ == _MAIN:
            parts[name] = visit_code(value.__code__, value.__globals__) + repr((value.__defaults__, value.__kwdefaults__))
        elif isinstance(value, type) and value.__module__ == _MAIN:
            for attribute, attribute_value in vars(value).items():
                visit(f"{name}.{attribute}", attribute_value)
        elif isinstance(value, str | bytes | int | float | list | tuple | dict | None):
            parts[name] = repr(value)

    def visit_code(code: CodeType, namespace: dict[str, Any]) -> str:
        """Visit everything that `code` uses, and return its own text."""
        for name in code.co_names:
            if name in namespace:
                visit(name, namespace[name])
        constants = [
            visit_code(constant, namespace)
            if isinstance(constant, CodeType)
            else repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
            for constant in code.co_consts
        ]
        return repr((code.co_code, code.co_names, code.co_varnames, constants))

    visit(function.__name__, function)
    return repr(sorted(parts.items()))
