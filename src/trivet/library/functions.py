"""Writes the functions that a user passes as files, by which the processes of the run import them.

A function is pickled with everything of the program that it uses. What a module on the path of imports defines is pickled by its
name. Only processes of the same user may read the files.
"""

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from trivet.errors import ConfigError
from trivet.storage.durable import write_atomically

FOLDER = ".functions"
"""The folder of these files in the output directory. The dot keeps it from counting as a result of an earlier run."""
_MAIN = "__main__"
# The text of a module whose value is in a pickle beside it.
_MODULE = '''"""A function of the program that started a run, as it was at that moment. Only processes of the same user read it."""

import pickle
import sys
from functools import partial
from pathlib import Path

from trivet.process.imports import import_by_path

sys.path.extend(folder for folder in {folders!r} if folder not in sys.path)
pickled = pickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())
{name} = {expression}
'''


class FunctionFiles:
    """Makes the import paths of a run's functions, and the files behind these paths."""

    def __init__(self, output_dir: Path) -> None:
        self._folder = output_dir.absolute() / FOLDER
        self._files: dict[Path, bytes] = {}
        """The content of each file that `write` will write."""

    def path_of(self, function: Callable[..., Any], *, argument: str) -> str:
        """Return the import path of `function`, which is valid once `write` was called.

        Raises a ConfigError, which names the user's `argument`, if it is no function or uses a value that cannot be pickled.
        """
        if not callable(function):
            raise ConfigError(f"{argument} must be a function, got {function!r}")
        return self._add(name_of(function, default=argument), "pickled", function, argument=argument, identity=function)

    def path_of_call(self, function: str, arguments: Mapping[str, Any], *, argument: str, identity: object) -> str:
        """Return the import path of a `load_environment` that calls the function at the import path `function` with `arguments`.

        `identity` is what of the arguments names the file.
        """
        expression = f"partial(import_by_path({function!r}), **pickled)"
        return self._add("load_environment", expression, dict(arguments), argument=argument, identity=identity)

    def write(self) -> None:
        """Write the files. Only their owner may read them, because they may contain secrets of the program."""
        if self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o700)
        for file, content in self._files.items():
            write_atomically(file, content, is_private=True)

    def _add(self, name: str, expression: str, value: object, *, argument: str, identity: object) -> str:
        """Add the module of `name`, and the pickle of `value`, which `expression` uses. Return the import path of `name`.

        Equal identities give equal names, also in a resumed run.
        """
        digest = hashlib.sha256(_identity(identity).encode()).hexdigest()
        file = self._folder / f"{name}_{digest[:8]}.py"
        folders = [str(Path(folder).absolute()) for folder in sys.path]
        self._files[file] = _MODULE.format(folders=folders, name=name, expression=expression).encode()
        self._files[file.with_suffix(".pickle")] = _pickle(value, argument=argument)
        return f"{file}:{name}"


def name_of(function: Callable[..., Any], *, default: str) -> str:
    """Return the name of a function, also inside a partial, or of the class of an object that can be called.

    Returns `default` for a lambda.
    """
    function = without_partial(function)
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else default


def without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside a `functools.partial`, or the function itself."""
    return function.func if isinstance(function, functools.partial) else function


def _pickle(value: object, *, argument: str) -> bytes:
    """Return `value` and everything of the program that it uses, pickled."""
    import cloudpickle  # here: most runs pass functions of packages, or none

    for name in _modules_of(value) - {_MAIN}:
        package = name.partition(".")[0]
        if name in sys.modules and not any(finder.find_spec(package, None) for finder in sys.meta_path):
            cloudpickle.register_pickle_by_value(sys.modules[name])  # no other process could import it by its name
    try:
        return cloudpickle.dumps(value)
    except Exception as exc:  # objects that a function uses may raise anything when they are pickled
        raise ConfigError(
            f"{argument} uses a value that other processes cannot have: {exc}; make it inside the function, or move it with the "
            "function into a file of its own, and import that"
        ) from exc


def _modules_of(value: object) -> set[str]:
    """Return the modules that define the functions in `value`."""
    if isinstance(value, Mapping):
        return set().union(*map(_modules_of, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_modules_of, value))
    if isinstance(value, functools.partial):
        return _modules_of([value.func, value.args, value.keywords])
    return {str(value.__module__)} if isinstance(value, FunctionType | type) else set()


def _identity(value: object, seen: dict[int, object] | None = None) -> str:
    """Return a text that identifies what functions of the program compute: their code, and what it uses of the program.

    Unlike pickled bytes, the text stays the same in another process and if a function moves to another line.

    Args:
        seen: the values that the text has already, by `id`. They are kept alive, so no later value gets the `id` of one.
    """
    if isinstance(value, str | bytes | int | float | None):
        return repr(value)
    seen = {} if seen is None else seen
    if id(value) in seen:
        return ""
    seen[id(value)] = value
    return f"{type(value).__name__}({', '.join(_identity(part, seen) for part in _parts_of(value))})"


def _parts_of(value: Any) -> Iterable[object]:
    """Return what identifies a value: of a function of the program its code and what it uses, of other functions the name."""
    value = cast(Any, inspect.unwrap(value) if callable(value) else value)
    match value:
        case dict():
            return [*value, *value.values()]
        case list() | tuple():
            return value
        case frozenset():
            return sorted(map(repr, value))
        case functools.partial():
            return [value.func, value.args, value.keywords]
        case MethodType():
            return [value.__func__]
        case CodeType() as code:
            return [code.co_code, code.co_names, code.co_varnames, code.co_consts]
        case FunctionType(__module__="__main__") as function:
            used = {name: function.__globals__.get(name) for name in _names_in(function.__code__)}
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            return [function.__code__, used, cells, function.__defaults__, function.__kwdefaults__]
        case type(__module__="__main__"):
            return [vars(value)[name] for name in sorted(vars(value)) if name != "__firstlineno__"]
        case FunctionType() | type():
            return [value.__module__, value.__qualname__]
    return ()


def _names_in(code: CodeType) -> list[str]:
    """Return the global names that `code` and the functions inside it use."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names_in(constant)]
    return [*code.co_names, *inner]
