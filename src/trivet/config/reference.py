"""Reads the strings under the fields of configuration sections from the source. For `--help` and the page of keys alone.

pydantic would read them too (`use_attribute_docstrings`), but whenever a section is imported, which took about a fifth of the time
that a command needs to start.
"""

import ast
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from trivet.config.dump import literal
from trivet.config.keys import KeyPath, Shape, dotted, find_key, key_of, nearest_key
from trivet.config.schema.base import Section, members
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
    """Return the string under the field `name` of `section` or of the class that it inherits the field from; empty without one."""
    owner = next(kind for kind in section.__mro__ if name in vars(kind).get("__annotations__", {}))
    return _docs_of(owner).get(name, "")


@cache
def _docs_of(section: type) -> dict[str, str]:
    """Return the string under each field of a class."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = inspect.cleandoc(doc).replace("\n", " ")
            case _:
                pass  # a method, or a field without a string under it
    return docs


NEEDED = "needed"
"""Stands for the default of a key that has to be given."""
USAGE = "[@ file.toml ...] [--section.key-name value ...] [--dry-run [--changed]] [--help [SECTION]]"
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
"""The command that reads each kind, and a line of it that works."""

REMARKS: dict[type[Section], str] = {
    RLConfig: "`uv run trainer`, `uv run orchestrator` and `uv run inference` start one role alone. They take the keys of its"
    " sections without the first part: `trainer.optim.lr` is `optim.lr`.",
    SftConfig: "Shares model, optimizer, schedule and checkpoints with the trainer.",
    EvalConfig: "Measures the start weights and every published step on a running server.",
    VfRLConfig: "The dialect of verifiers' trainer, translated to the keys of `rl`: `--dry-run` prints the key of each value.",
}
"""The kinds of configuration that have a reference page, each with a remark."""


class KeyRow(NamedTuple):
    """A key, as text."""

    name: str
    type: str
    default: str
    """As TOML, or `NEEDED`."""
    text: str


class SectionRows(NamedTuple):
    """A section with the keys that it holds itself, as text."""

    path: str
    """The dotted name; empty for the top level."""
    header: str
    """The header in TOML, with brackets; empty for the top level."""
    text: str
    rows: Sequence[KeyRow]


def usage_text(kind: type[Section]) -> str:
    """Return how the command that reads `kind` is called."""
    command, example = EXAMPLES[kind]
    return f"usage: {command} {USAGE}\n e.g.: uv run {example}"


def help_text(kind: type[Section], only: str = "") -> str:
    """Return the usage and every key of `kind`.

    Args:
        only: the section whose keys alone are wanted, such as `trainer.optim`, with the sections in it.

    Raises:
        ConfigError: there is no such section.
    """
    sections = [section for section in section_rows(kind) if not only or f"{section.path}.".startswith(f"{only}.")]
    if not sections:
        nearest = nearest_key(kind, tuple(only.split("."))) if find_key(kind, tuple(only.split("."))) is None else None
        hint = f"did you mean {nearest}?" if nearest else "--help alone lists all"
        raise ConfigError(f"--help {shorten(only)}: there is no such section; {hint}")
    lines = [usage_text(kind)]
    for section in sections:
        lines += ["", f"{section.header}  {section.text}".strip()]
        for row in section.rows:
            text = f". {row.text}" if row.text else ""
            default = row.default if row.default == NEEDED else f"default {row.default}"
            lines.append(f"  {row.name:<26} {row.type}, {default}{text}")
    return "\n".join(lines)


def reference_pages() -> dict[str, str]:
    """Return a page with every key for each command. A role's sections are listed once, under the run that holds them."""
    pages: dict[str, str] = {}
    for kind, remark in REMARKS.items():
        command, example = EXAMPLES[kind]
        parts = [f"# Keys of `{command}`\n\n```\nuv run {example}\n```\n\n{remark}\n"]
        for section in section_rows(kind):
            title = f"## `{section.header}`" if section.header else "## Top level"
            lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
            for row in section.rows:
                name, kind_of_value, default, text = (cell.replace("|", "\\|") for cell in row)
                lines.append(f"| `{name}` | {kind_of_value} | {default if default == NEEDED else f'`{default}`'} | {text} |")
            parts.append("\n\n".join([title, *([section.text] if section.text else []), "\n".join(lines)]) + "\n")
        pages[command] = "\n".join(parts)
    return pages


def section_rows(kind: type[Section], path: KeyPath = (), header: str = "", text: str = "") -> Iterator[SectionRows]:
    """Yield each section of `kind` with the keys that it holds itself, in the order of the models."""
    fields = [(name, field, key_of(field)) for name, field in kind.model_fields.items()]
    rows = [_row(kind, name, field) for name, field, key in fields if not key.sections]
    if rows:
        yield SectionRows(path=dotted(path), header=header, text=text, rows=rows)
    for name, field, key in fields:
        inner = (*path, name)
        brackets = f"[[{dotted(inner)}]]" if key.shape is Shape.SECTION_LIST else f"[{dotted(inner)}]"
        default = field.get_default(call_default_factory=True)
        remarks = [field_doc(kind, name), "Off unless it is given." if default is None else ""]
        if default is not None and type(None) in members(field.annotation):
            remarks.append(f'`{name} = "None"` takes it away.')
        for section in key.sections:
            variant = f' type = "{section.model_fields["type"].default}"' if len(key.sections) > 1 else ""
            description = " ".join(remark for remark in (*remarks, inspect.cleandoc(section.__doc__ or "")) if remark)
            yield from section_rows(section, inner, brackets + variant, description)


def _row(kind: type[Section], name: str, field: FieldInfo) -> KeyRow:
    default = field.get_default(call_default_factory=True)
    bounds = [
        f"{sign} {getattr(bound, attribute)}"
        for bound in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"), ("min_length", "at least"))
        if getattr(bound, attribute, None) is not None
    ]
    return KeyRow(
        name=name,
        type=", ".join([_type_name(field.annotation), *bounds]),
        default=NEEDED if field.is_required() else "None" if default is None else literal(default),
        text=field_doc(kind, name),
    )


def _type_name(annotation: Any) -> str:
    names: list[str] = []
    for member in members(annotation):
        if get_origin(member) is Literal:
            names += [f'"{choice}"' for choice in get_args(member)]
        elif get_origin(member) is list:
            names.append(f"list of {_type_name(get_args(member)[0])}")
        else:
            plain = {dict: "table", type(None): "None", str: "text", Path: "path"}
            names.append(plain.get(get_origin(member) or member) or str(member.__name__))
    return " | ".join(names)
