"""Lists the keys of a configuration with their documentation, for `--help` and for scripts/docs_configuration.py.

The documentation of a key is the docstring under its field, which is read from the source. pydantic could read it too
(`use_attribute_docstrings`), but would do so at every import, which took a fifth of the time that a command needs to start.
"""

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from trivet.config.dump import literal
from trivet.config.keys import KeyPath, Shape, dotted, find_key, key_of, nearest_key
from trivet.config.schema.base import Section, union_members
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.errors import ConfigError
from trivet.shown_text import shorten


def field_doc(section: type[Section], name: str) -> str:
    """Return the docstring of the field `name` of `section`, which may be inherited; empty if the field has none."""
    owner = next(kind for kind in section.__mro__ if name in vars(kind).get("__annotations__", {}))
    return _docs_of(owner).get(name, "")


@cache
def _docs_of(section: type) -> dict[str, str]:
    """Return the docstring under each field of a class, by the field's name."""
    definition = _classes_of(section.__module__)[section.__name__]
    docs: dict[str, str] = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = inspect.cleandoc(doc).replace("\n", " ")
            case _:
                pass  # a method, or a field without a string under it
    return docs


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Return the definition of each class of a module, which is parsed once for all of them."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


NEEDED = "needed"
"""Stands in place of the default for a key that must be set."""
USAGE = "[@ file.toml ...] [--section.key-name value ...] [--dry-run [--changed]] [--help [SECTION]] [--version]"
EXAMPLES: dict[type[Section], tuple[str, str]] = {
    RLConfig: ("rl", "rl @ config.toml --trainer.optim.lr 1e-5"),
    TrainerConfig: ("trainer", "trainer @ trainer.toml"),
    OrchestratorConfig: ("orchestrator", "orchestrator @ orchestrator.toml"),
    InferenceConfig: ("inference", "inference @ inference.toml"),
    SftConfig: ("sft", "sft @ sft.toml --data.name data.jsonl"),
    EvalConfig: (
        "eval",
        "eval --client.base-url http://127.0.0.1:8000/v1 --weights-dir outputs/weights --env.id ID --steps 10,50",
    ),
    VfRLConfig: ("vf-rl", "vf-rl @ configs/vf-rl/reverse-text.toml --trainer.args.max-steps 20"),
}
"""The command that reads each kind of configuration, and a command line that works."""


class KeyEntry(NamedTuple):
    """The texts that the reference shows for a key."""

    name: str
    type: str
    default: str
    """The default as TOML, or `NEEDED`."""
    text: str


class SectionEntry(NamedTuple):
    """The texts that the reference shows for a section, with the keys that are directly in it."""

    path: str
    """The dotted name; empty for the top level."""
    header: str
    """The header in TOML, with brackets; empty for the top level."""
    text: str
    keys: Sequence[KeyEntry]


def usage_text(kind: type[Section]) -> str:
    """Return how the command that reads `kind` is called."""
    command, example = EXAMPLES[kind]
    return f"usage: {command} {USAGE}\n e.g.: uv run {example}"


def help_text(kind: type[Section], section_path: str = "") -> str:
    """Return the usage and every key of `kind`.

    Args:
        section_path: show only this section and the sections in it, such as `trainer.optim`; empty for all.

    Raises:
        ConfigError: there is no such section.
    """
    sections = [
        section for section in list_sections(kind) if not section_path or f"{section.path}.".startswith(f"{section_path}.")
    ]
    if not sections:
        path = tuple(section_path.split("."))
        nearest = nearest_key(kind, path) if find_key(kind, path) is None else None
        hint = f"did you mean {nearest}?" if nearest else "--help alone lists all"
        raise ConfigError(f"--help {shorten(section_path)}: there is no such section; {hint}")
    lines = [usage_text(kind)]
    for section in sections:
        lines += ["", f"{section.header}  {section.text}".strip()]
        for entry in section.keys:
            text = f". {entry.text}" if entry.text else ""
            default = entry.default if entry.default == NEEDED else f"default {entry.default}"
            lines.append(f"  {entry.name:<26} {entry.type}, {default}{text}")
    return "\n".join(lines)


def list_sections(kind: type[Section], path: KeyPath = (), header: str = "", text: str = "") -> Iterator[SectionEntry]:
    """Yield each section of `kind` with the keys that are directly in it, in the order of the models.

    Args:
        path, header, text: those of the section `kind` itself; empty for the top level.
    """
    fields = [(name, field, key_of(field)) for name, field in kind.model_fields.items()]
    keys = [_key_entry(kind, name, field) for name, field, key in fields if not key.sections]
    if keys:
        yield SectionEntry(path=dotted(path), header=header, text=text, keys=keys)
    for name, field, key in fields:
        inner = (*path, name)
        brackets = f"[[{dotted(inner)}]]" if key.shape is Shape.SECTION_LIST else f"[{dotted(inner)}]"
        default = field.get_default(call_default_factory=True)
        remarks = [field_doc(kind, name), "Off unless it is given." if default is None else ""]
        if default is not None and type(None) in union_members(field.annotation):
            remarks.append(f'`{name} = "None"` takes it away.')
        for section in key.sections:
            variant = f' type = "{section.model_fields["type"].default}"' if len(key.sections) > 1 else ""
            description = " ".join(remark for remark in (*remarks, inspect.cleandoc(section.__doc__ or "")) if remark)
            yield from list_sections(section, inner, brackets + variant, description)


def _key_entry(kind: type[Section], name: str, field: FieldInfo) -> KeyEntry:
    default = field.get_default(call_default_factory=True)
    bounds = [
        f"{sign} {getattr(bound, attribute)}"
        for bound in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"), ("min_length", "at least"))
        if getattr(bound, attribute, None) is not None
    ]
    return KeyEntry(
        name=name,
        type=", ".join([_type_name(field.annotation), *bounds]),
        default=NEEDED if field.is_required() else "None" if default is None else literal(default),
        text=field_doc(kind, name),
    )


def _type_name(annotation: Any) -> str:
    names: list[str] = []
    for member in union_members(annotation):
        if get_origin(member) is Literal:
            names += [f'"{choice}"' for choice in get_args(member)]
        elif get_origin(member) is list:
            names.append(f"list of {_type_name(get_args(member)[0])}")
        else:
            plain = {dict: "table", type(None): "None", str: "text", Path: "path"}
            names.append(plain.get(get_origin(member) or member) or str(member.__name__))
    return " | ".join(names)
