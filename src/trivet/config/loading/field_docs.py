"""Reads the strings under the fields of configuration sections from the source. For `--help` and the page of keys alone.

pydantic would read them too (`use_attribute_docstrings`), but whenever a section is imported, which took about a fifth of the time
that a command needs to start.
"""

import ast
import inspect
import sys
from functools import cache

from trivet.config.sections.base import Section


def field_doc(section: type[Section], name: str) -> str:
    """Return the string under the field `name` of `section` or of the class that it inherits the field from; empty without one."""
    owner = next(kind for kind in section.__mro__ if name in vars(kind).get("__annotations__", {}))
    return _docs_of_module(owner.__module__).get((owner.__qualname__, name), "")


@cache
def _docs_of_module(module: str) -> dict[tuple[str, str], str]:
    """Return the string under each field, by the names of its class and of itself."""
    docs: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                        docs[node.name, name] = inspect.cleandoc(doc)
                    case _:
                        pass  # a method, or a field without a string under it
    return docs
