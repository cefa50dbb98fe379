"""The schema of the messages between a pool and its workers, and the version of the protocol that stands for it."""

import hashlib
import json

import msgspec

from trivet.wire.workers import PROTOCOL, WorkerAnswer, WorkerHello, WorkerOrder

DIGESTS = {
    1: "a0658602df162e8f5d5d90f9aabe5db8644e9a05ddbb41817a4f746df2cbd90b",
    2: "2bec8d027e1ced7983d1b5d60cffa7c84ebcb1713f4fe96f5888e355ed1bf7e0",
    3: "13cedb672c3f1518bd005bbee7732d293c72ac3bef0c710e4ece66b3ed13d959",
    4: "3482f57fc0497e747ba7bb13f32274e3f991dc6e2585e6a9ab5bb83b6d86a678",
    5: "1a07a5d73f4f7faf09de252885e5ba69343d03f68dd9ba1fb3d1d31f0344d182",
    6: "0633ae1527f5018cce39335e46ada689b9dc2c0162a9f78d12254dc22a650b68",
    7: "93e05193777f6f6679c19868debafa9eb639d4c39233639b09946ea1ed8503eb",
    8: "fe15be18b9120c2777b177bd068d011621934cc318a1c5f5bf199f6130d95fec",
    9: "ef70b9272ccb9d33667770fff5ebebfeba1da49b85af3244b365c3edfaeef046",
}
"""Digest of the schema by version of the protocol. A released line never changes: a changed schema needs the next version."""


def schema_digest() -> str:
    """SHA-256 over the names, types and defaults of every field of every message."""
    described = [_describe(msgspec.inspect.type_info(kind), set()) for kind in (WorkerHello, WorkerOrder, WorkerAnswer)]
    return hashlib.sha256(json.dumps(described, default=repr).encode()).hexdigest()


def _describe(info: object, seen: set[str]) -> object:
    if isinstance(info, msgspec.inspect.StructType):
        name = info.cls.__name__
        if name in seen:
            return name
        seen.add(name)
        fields = [(field.encode_name, field.required, _describe(field.type, seen)) for field in info.fields]
        return [name, info.tag_field, info.tag, info.array_like, fields]
    if isinstance(info, msgspec.inspect.CustomType):
        return info.cls.__name__
    parts = {
        name: getattr(info, name) for name in ("item_type", "key_type", "value_type", "types", "values") if hasattr(info, name)
    }
    described = {
        name: [_describe(each, seen) for each in value] if isinstance(value, tuple) else _describe(value, seen)
        for name, value in parts.items()
    }
    if isinstance(info, msgspec.inspect.EnumType):
        return [info.cls.__name__, [member.value for member in info.cls]]
    return [type(info).__name__, described]


def test_a_changed_message_has_a_new_version_of_the_protocol() -> None:
    assert list(DIGESTS) == list(range(1, PROTOCOL + 1))
    assert schema_digest() == DIGESTS[PROTOCOL], (
        "a message between pool and worker changed: raise trivet.wire.workers.PROTOCOL and add the digest"
    )
