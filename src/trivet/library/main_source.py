"""Copies a function of `__main__`, a script or a notebook, into a module of its own: its source and that of what it uses.

The processes of a run import that module. Nothing is pickled: a value that source text cannot express is refused by its name.
"""

import __future__

import ast
import builtins
import inspect
import linecache
import re
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from trivet.errors import ConfigError

MAIN = "__main__"
_REMEDY = "move it with the function into a file of its own, and import that"


def source_of(function: Callable[..., Any], *, argument: str) -> str:
    """Return the text of a module that defines `function` as it is now.

    Args:
        function: a function that `__main__` defines at its top level.
        argument: the name under which the user passed it, for messages.

    Raises:
        ConfigError: its source is unknown, or it uses what source text cannot express.
    """
    copy = _Copy(function.__globals__, argument=argument)
    copy.add(function.__name__, function)
    return copy.text()


def is_installed(module: ModuleType) -> bool:
    """Return whether every process of this interpreter finds the module: it is built in or lies where packages are installed."""
    folder = _search_folder(module)
    return folder is None or folder in {Path(path).resolve() for path in sysconfig.get_paths().values()}


class _Copy:
    """The module that is being written."""

    def __init__(self, namespace: Mapping[str, Any], *, argument: str) -> None:
        self._namespace = namespace
        self._argument = argument
        self._folders: dict[str, None] = {}
        """Folders in which the modules lie that are not installed."""
        self._imports: list[str] = []
        self._statements: list[str] = []
        self._names: set[str] = set()
        """Names that are defined, or about to be."""
        self._needs_future = False

    def text(self) -> str:
        future = ["from __future__ import annotations"] if self._needs_future else []
        paths = ["import sys", *(f"sys.path.append({folder!r})" for folder in self._folders)] if self._folders else []
        head = "\n".join(['"""Functions of the program that started a run, as they were at that moment."""', *future, *paths])
        return "\n\n\n".join(["\n".join([head, *self._imports]), *self._statements]) + "\n"

    def add(self, name: str, value: Any) -> None:
        """Define `name` as `value` in the module, after everything that its definition uses."""
        if name in self._names:
            return
        self._names.add(name)
        if isinstance(value, ModuleType):
            self._import(value, f"import {value.__name__}" + ("" if name == value.__name__ else f" as {name}"))
        elif _is_of_main(value):
            self._define(name, value)
        elif (origin := _find_in_its_module(value)) is not None:
            module, attribute = origin
            self._import(module, f"from {module.__name__} import {attribute}" + ("" if name == attribute else f" as {name}"))
        elif (literal := _literal(value)) is not None:
            self._statements.append(f"{name} = {literal}")
        elif isinstance(value, re.Pattern):
            self.add("re", re)
            self._statements.append(f"{name} = re.compile({value.pattern!r}, {value.flags})")
        else:
            raise ConfigError(
                f"{self._argument} uses {name}, a value of type {type(value).__name__}, which other processes cannot be told as "
                f"source text; make it inside the function, or {_REMEDY}"
            )

    def _import(self, module: ModuleType, statement: str) -> None:
        if module.__name__ == MAIN:
            raise ConfigError(f"{self._argument} uses the module __main__ itself, which other processes do not have; {_REMEDY}")
        if not is_installed(module):
            self._folders[str(_search_folder(module))] = None
        self._imports.append(statement)

    def _define(self, name: str, value: Any) -> None:
        if value.__name__ != name:  # another name for it
            if self._namespace.get(value.__name__) is not value:
                raise ConfigError(f"{self._argument} uses {name}, which was defined as {value.__name__} and renamed; {_REMEDY}")
            self.add(value.__name__, value)
            self._statements.append(f"{name} = {value.__name__}")
            return
        source = _source_of_class(value) if isinstance(value, type) else _source_of_function(value)
        if source is None:
            raise ConfigError(f"{self._argument} uses {name}, whose source is not known or has changed; {_REMEDY}")
        code = getattr(inspect.unwrap(value), "__code__", None)
        self._needs_future |= code is not None and bool(code.co_flags & __future__.annotations.compiler_flag)
        for used in _globals_of(source):
            if used in self._namespace and not (hasattr(builtins, used) and used.startswith("__")):
                self.add(used, self._namespace[used])
        self._statements.append(source)


def _is_of_main(value: Any) -> bool:
    return isinstance(value, type | type(lambda: None)) and value.__module__ == MAIN


def _find_in_its_module(value: Any) -> tuple[ModuleType, str] | None:
    """Return the module that has `value`, and its name there."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    for name in (getattr(value, "__name__", None), getattr(value, "_name", None)):
        if module is not None and isinstance(name, str) and getattr(module, name, None) is value:
            return module, name
    return None


def _literal(value: Any) -> str | None:
    """Return the text of a number, a text, or a table, list, set or tuple of such; None for any other value."""
    text = repr(value)
    try:
        return text if ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _globals_of(source: str) -> Iterator[str]:
    """Yield the names of the module that a definition uses, those of its decorators, defaults and bases too."""
    tables = [symtable.symtable(source, MAIN, "exec")]
    while tables:
        table = tables.pop()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
                yield symbol.get_name()
        tables.extend(table.get_children())


def _source_of_function(function: Any) -> str | None:
    function = inspect.unwrap(function)
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    found = [node for node in _definitions(lines, function.__name__) if _first_line(node) == code.co_firstlineno]
    return _text_of(lines, found[-1]) if found else None


def _source_of_class(kind: type) -> str | None:
    """A class does not know its file: its methods do; one without methods is looked for in the script and the cells."""
    methods = [code.co_filename for member in vars(kind).values() if (code := getattr(member, "__code__", None)) is not None]
    script = getattr(sys.modules[MAIN], "__file__", None)
    for file in (*methods, *([script] if script else []), *reversed(linecache.cache)):
        lines = linecache.getlines(file)
        found = [node for node in _definitions(lines, kind.__name__) if isinstance(node, ast.ClassDef)]
        if found:
            return _text_of(lines, found[-1])
    return None


def _definitions(lines: list[str], name: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            yield node


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _text_of(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    return textwrap.dedent("".join(lines[_first_line(node) - 1 : node.end_lineno])).rstrip()


def _search_folder(module: ModuleType) -> Path | None:
    """Return the folder in which the import system found the module's outermost package; None for one without a file."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    file = getattr(top, "__file__", None)
    if file is not None:
        folder = Path(file).resolve().parent
        return folder.parent if hasattr(top, "__path__") else folder
    paths = list(getattr(top, "__path__", []))
    return Path(paths[0]).resolve().parent if paths else None
