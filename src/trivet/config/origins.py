"""Holds values together with where they came from, before they are validated.

Only `config.load` and `config.resolve` change them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from trivet.config.keys import KeyPath, dotted
from trivet.config.tables import as_list, as_table


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value with its origin."""

    value: object
    origin: str
    """The source in the user's words: a file, a flag, a variable, or the key that a derived value was taken from."""
    is_derived: bool = False
    """A copy of another key's value: what is wrong with it is said once, at that key."""


Node: TypeAlias = "Sourced | dict[str, Node] | list[Node]"
Tree: TypeAlias = dict[str, Node]


def annotate(value: object, origin: str) -> Node:
    """Give every value below `value` its origin. Tables and lists of tables stay open; the text "None" is null."""
    if (table := as_table(value)) is not None:
        return {name: annotate(item, origin) for name, item in table.items()}
    if (items := as_list(value)) and all(isinstance(item, dict) for item in items):
        return [annotate(item, origin) for item in items]
    return Sourced(None if value == "None" else value, origin)


def plain(node: Node) -> object:
    """Return the values without their origins."""
    if isinstance(node, dict):
        return {name: plain(item) for name, item in node.items()}
    if isinstance(node, list):
        return [plain(item) for item in node]
    return node.value


def leaves(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Sourced]]:
    """Yield every value with its path; an empty table has none."""
    if isinstance(node, Sourced):
        yield path, node
    elif isinstance(node, dict):
        for name, item in node.items():
            yield from leaves(item, (*path, name))
    else:
        for index, item in enumerate(node):
            yield from leaves(item, (*path, index))


def _child(node: Node, part: str) -> "Node | None":
    if isinstance(node, dict):
        return node.get(part)
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        return node[int(part)]
    return None


class Draft:
    """A configuration in the making, addressed by dotted keys. What it does not hold has its default."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def find(self, key: str) -> "Node | None":
        """Return the node at a key, or None."""
        node: Node = self.tree
        for part in key.split("."):
            child = _child(node, part)
            if child is None:
                return None
            node = child
        return node

    def leaf(self, key: str) -> Sourced | None:
        """Return the value at a key, or None; a table or a list of tables is no value."""
        node = self.find(key)
        return node if isinstance(node, Sourced) else None

    def is_null(self, key: str) -> bool:
        """Return whether the section `key`, or one that holds it, was set to null."""
        parts = key.split(".")
        heads = (self.leaf(".".join(parts[: end + 1])) for end in range(len(parts)))
        return any(leaf is not None and leaf.value is None for leaf in heads)

    def derive(self, key: str, value: object, origin: str) -> None:
        """Set `key` to a value that another key determines."""
        *parents, last = key.split(".")
        table = self.tree
        for part in parents:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                return  # not a table: validation will say so, or it is null on purpose
            table = inner
        table[last] = {} if value == {} else Sourced(value, origin, is_derived=True)

    def origins(self) -> dict[str, str]:
        """Return the origin of every value, by dotted key."""
        return {dotted(path): leaf.origin for path, leaf in leaves(self.tree)}
