"""The fingerprint of a policy's tensors notices whatever changes them, and is the same wherever they are."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.tiny_models import tiny_model_writer
from trivet.transfer import tensors as module
from trivet.transfer.tensors import Fingerprint, describe, fingerprint_files, map_tensors
from trivet.wire.transfers import TensorInfo


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    made = Fingerprint()
    for name, tensor in tensors.items():
        made.add(describe(name, tensor), tensor)
    return made.digest()


def example(dtype: torch.dtype = torch.bfloat16, num: int = 37) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(num, generator=generator).to(dtype) for name in ("a", "b")}


@given(
    bit=st.integers(0, 8 * 2 * 37 - 1),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int8]),
    name=st.sampled_from("ab"),
)
def test_every_flipped_bit_changes_it(bit: int, dtype: torch.dtype, name: str) -> None:
    tensors = example(dtype)
    before = fingerprint(tensors)
    data = tensors[name].view(torch.uint8)
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    assert fingerprint(tensors) != before


def test_swapped_words_tensors_and_names_change_it() -> None:
    tensors = example(torch.float32, num=64)
    words = tensors["a"].view(torch.int64)
    swapped = words.clone()
    swapped[[3, 20]] = words[[20, 3]]
    changes = [
        {"a": tensors["b"], "b": tensors["a"]},
        {"a": tensors["a"], "c": tensors["b"]},
        {"a": tensors["a"]},
        {"a": swapped.view(torch.float32), "b": tensors["b"]},
        {"a": tensors["a"].reshape(8, 8), "b": tensors["b"]},
        {"a": tensors["a"].view(torch.int32), "b": tensors["b"]},
        {"a": torch.cat([tensors["a"], torch.zeros(1)]), "b": tensors["b"]},
    ]
    found = {fingerprint(tensors), *map(fingerprint, changes)}
    assert len(found) == 1 + len(changes)


def test_the_highest_bits_of_two_words_do_not_cancel() -> None:
    """They would in a sum of words times positions."""
    tensors = {"a": torch.arange(16, dtype=torch.int64)}
    before = fingerprint(tensors)
    tensors["a"][[2, 5]] ^= -(1 << 63)
    assert fingerprint(tensors) != before


def test_it_does_not_depend_on_order_alignment_or_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = example(num=1000)
    expected = fingerprint(tensors)
    memory = torch.zeros(1001, dtype=torch.bfloat16)
    memory[1:] = tensors["a"]
    assert memory[1:].data_ptr() % 8
    assert fingerprint({"b": tensors["b"], "a": memory[1:]}) == expected
    monkeypatch.setattr(module, "_CPU_CHUNK", 7)
    assert fingerprint(tensors) == expected


def test_a_scalar_and_an_empty_tensor_have_one() -> None:
    found = {fingerprint({"a": tensor}) for tensor in (torch.zeros(()), torch.zeros(1), torch.zeros(0), torch.ones(()))}
    assert len(found) == 4


def test_tensors_of_several_files_are_mapped_in_the_order_of_names(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny_model_writer(tied=False)(tmp_path)
    whole = fingerprint_files(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    mapped = map_tensors(tmp_path)
    assert list(mapped) == sorted(expected)
    assert all(torch.equal(mapped[name], tensor) for name, tensor in expected.items())
    assert fingerprint_files(tmp_path) == whole == fingerprint(expected)
    assert describe("x", torch.zeros(2, 3, dtype=torch.bfloat16)) == TensorInfo("x", "bfloat16", [2, 3])
