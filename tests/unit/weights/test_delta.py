"""A delta applied to its base gives the published files bit for bit. Anything else is an error, and never other weights."""

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from trivet.errors import WeightsError
from trivet.storage.durable import hash_files
from trivet.weights import delta
from trivet.weights.delta import apply_deltas, write_delta
from trivet.weights.manifest import Manifest, make_manifest

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
]  # fmt: skip
GENERATOR = torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def small_chunks_and_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(delta, "MAX_DELTA_SHARE", 1000)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of random bits, NaNs with payloads among them."""
    if dtype is torch.bool:
        return torch.rand(shape, generator=GENERATOR) < 0.5
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).random_(0, 256, generator=GENERATOR)
    return tensor


def move(tensor: torch.Tensor, share: float) -> torch.Tensor:
    """Return the tensor with other random bits in a share of its values."""
    is_changed = torch.rand(tensor.shape, generator=GENERATOR) < share
    return torch.where(is_changed, random_bits(tuple(tensor.shape), tensor.dtype), tensor)


class Policies:
    """Directories of policies below one directory, and deltas between them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests: list[Manifest] = []

    def directory(self, number: int) -> Path:
        return self.root / str(number)

    def add(self, **tensors: torch.Tensor) -> int:
        """Add a policy with one weights file and one other; return its number."""
        self.start()
        save_file(tensors, self.directory(len(self.manifests)) / "model.safetensors")
        (self.directory(len(self.manifests)) / "config.json").write_text('{"layers": 2}')
        return self.finish()

    def start(self) -> Path:
        self.directory(len(self.manifests)).mkdir()
        return self.directory(len(self.manifests))

    def finish(self) -> int:
        number = len(self.manifests)
        self.manifests.append(make_manifest(self.directory(number), version=number))
        return number

    def write(self, base: int, new: int) -> Path:
        path, old, manifest = self.root / f"{base}-{new}.delta", self.manifests[base], self.manifests[new]
        write_delta(self.directory(base), self.directory(new), path, old=old, new=manifest)
        return path

    def apply(self, paths: list[Path], base: int, new: int) -> Path:
        """Apply deltas, and compare the result with the published files, byte for byte."""
        result = self.root / "result"
        shutil.rmtree(result, ignore_errors=True)
        result.mkdir()
        apply_deltas(paths, self.directory(base), result, manifest=self.manifests[new], suffix=".partial")
        assert hash_files(result, [path.name for path in result.iterdir()]) == self.manifests[new].files
        for name in self.manifests[new].files:
            assert (result / name).read_bytes() == (self.directory(new) / name).read_bytes()
        return result


@pytest.fixture
def policies(tmp_path: Path) -> Policies:
    return Policies(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_is_what_was_published(policies: Policies, dtype: torch.dtype, share: float) -> None:
    tensors = {"a": random_bits((41, 67), dtype), "scalar": random_bits((), dtype), "empty": random_bits((0, 3), dtype)}
    base = policies.add(**tensors)
    new = policies.add(**{name: move(tensor, share) for name, tensor in tensors.items()})
    policies.apply([policies.write(base, new)], base, new)


def test_dtypes_of_one_file_may_differ(policies: Policies) -> None:
    tensors = {str(dtype): random_bits((1999,), dtype) for dtype in DTYPES}
    base = policies.add(**tensors)
    new = policies.add(**{name: move(tensor, 0.02) for name, tensor in tensors.items()})
    policies.apply([policies.write(base, new)], base, new)


def test_values_are_compared_as_bits(policies: Policies) -> None:
    """A delta that compared floats would lose zeros of the other sign, and payloads of NaNs."""
    bits = torch.tensor([0x00000000, 0x7FC00001, 0x7FC00001, 0x7F800000], dtype=torch.int32)
    others = torch.tensor([-0x80000000, 0x7FC00001, 0x7FC00002, -0x00800000], dtype=torch.int32)
    base, new = policies.add(a=bits.view(torch.float32)), policies.add(a=others.view(torch.float32))
    policies.apply([policies.write(base, new)], base, new)


def test_equal_policies_need_no_chunks(policies: Policies) -> None:
    tensor = random_bits((20_000,), torch.bfloat16)
    base, new = policies.add(a=tensor), policies.add(a=tensor)
    path = policies.write(base, new)
    assert not any(path.read_bytes()), "only the sizes of empty frames"
    policies.apply([path], base, new)


@pytest.mark.parametrize(("dtype", "max_share"), [(torch.bfloat16, 0.014), (torch.float32, 0.008)], ids=str)
def test_a_hundredth_of_values_changed_takes_about_a_hundredth_of_the_bytes(
    policies: Policies, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, max_share: float
) -> None:
    """The bar is 5 %. The entropy of the positions, and of a step up or down, is 0.6 % of bfloat16's bytes."""
    monkeypatch.setattr(delta, "_CHUNK_BYTES", 2 << 20)
    weights = (torch.randn(1_000_000, generator=GENERATOR) * 0.02).to(dtype)
    bits = weights.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
    steps = (torch.rand(bits.shape, generator=GENERATOR) < 0.01) * (
        2 * torch.randint(0, 2, bits.shape, generator=GENERATOR) - 1
    )
    base, new = policies.add(a=weights), policies.add(a=(bits + steps.to(bits.dtype)).view(dtype))
    path = policies.write(base, new)
    assert path.stat().st_size < max_share * policies.manifests[new].num_bytes
    policies.apply([path], base, new)


def test_float32_weights_that_all_moved_a_little_take_less_than_half(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_CHUNK_BYTES", 2 << 20)
    weights = torch.randn(1_000_000, generator=GENERATOR) * 0.02
    base = policies.add(a=weights)
    new = policies.add(a=weights + 1e-6 * torch.randn(weights.shape, generator=GENERATOR))
    path = policies.write(base, new)
    assert path.stat().st_size < 0.5 * policies.manifests[new].num_bytes
    policies.apply([path], base, new)


def test_files_of_any_kind_and_number_are_covered(policies: Policies) -> None:
    contents = [
        {
            "model-1.safetensors": b"a" * 9000,
            "model-2.safetensors": b"b" * 5,
            "model.safetensors.index.json": b"{}",
            "empty": b"",
        },
        {
            "model-1.safetensors": b"a" * 9000,
            "model-2.safetensors": b"bbccb",
            "model.safetensors.index.json": b"[]",
            "empty": b"",
        },
    ]
    for files in contents:
        directory = policies.start()
        for name, content in files.items():
            (directory / name).write_bytes(content)
        policies.finish()
    policies.apply([policies.write(0, 1)], 0, 1)


@pytest.mark.parametrize("files", [{"a": b"x"}, {"a": b"xyz"}, {"a": b"xy", "b": b""}, {"c": b"xy"}])
def test_there_is_no_delta_between_files_of_other_names_or_sizes(policies: Policies, files: dict[str, bytes]) -> None:
    for contents in ({"a": b"xy"}, files):
        directory = policies.start()
        for name, content in contents.items():
            (directory / name).write_bytes(content)
        policies.finish()
    with pytest.raises(WeightsError, match="other files"):
        policies.write(0, 1)


def test_several_deltas_are_applied_at_once(policies: Policies) -> None:
    tensor = random_bits((5000,), torch.bfloat16)
    for share in (0, 0.01, 0.9, 0, 0.02):
        tensor = move(tensor, share)
        policies.add(a=tensor)
    paths = [policies.write(number, number + 1) for number in range(4)]
    for first in range(4):
        policies.apply(paths[first:], first, 4)


@settings(max_examples=60, deadline=None)
@given(
    old=st.binary(max_size=300), new=st.binary(max_size=300), is_edit=st.booleans(), chunk=st.sampled_from([1, 7, 8, 24, 64])
)  # fmt: skip
def test_any_bytes_survive(tmp_path_factory, old: bytes, new: bytes, is_edit: bool, chunk: int) -> None:
    policies = Policies(tmp_path_factory.mktemp("policies"))
    size = min(len(old), len(new))
    for content in (old[:size], (old[: size // 2] + new[size // 2 : size]) if is_edit else new[:size]):
        (policies.start() / "model.safetensors").write_bytes(content)
        policies.finish()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "_CHUNK_BYTES", chunk)
        policies.apply([policies.write(0, 1)], 0, 1)


def test_a_delta_that_would_be_too_large_is_given_up_early(policies: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "MAX_DELTA_SHARE", 0.6)
    base, new = (policies.add(a=random_bits((100_000,), torch.bfloat16)) for _ in range(2))
    with pytest.raises(WeightsError, match="more than 60% of the policy's bytes"):
        policies.write(base, new)
    assert (policies.root / "0-1.delta").stat().st_size < 0.6 * 200_000 + 2 * 4096


@pytest.fixture
def small_pair(policies: Policies, monkeypatch: pytest.MonkeyPatch) -> tuple[Policies, Path]:
    """Two small policies, and a delta with chunks where all changed, few, and nothing."""
    monkeypatch.setattr(delta, "_CHUNK_BYTES", 512)
    tensor = random_bits((1000,), torch.bfloat16)
    few = tensor.clone()
    few[:300:20] += 1
    policies.add(a=tensor, b=random_bits((400,), torch.bfloat16))
    policies.add(a=few, b=random_bits((400,), torch.bfloat16))
    return policies, policies.write(0, 1)


def test_no_altered_byte_gives_other_weights(small_pair: tuple[Policies, Path]) -> None:
    """Flip one bit of every byte. The result is an error, or exactly what was published."""
    policies, path = small_pair
    content = path.read_bytes()
    num_errors = 0
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ (1 << position % 8)]) + content[position + 1 :])
        try:
            policies.apply([path], 0, 1)  # it compares the bytes
        except WeightsError:
            num_errors += 1
    assert num_errors > 0.99 * len(content)


def test_an_incomplete_delta_is_refused(small_pair: tuple[Policies, Path]) -> None:
    policies, path = small_pair
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        with pytest.raises(WeightsError):
            policies.apply([path], 0, 1)


def test_another_base_is_refused(small_pair: tuple[Policies, Path]) -> None:
    policies, path = small_pair
    policies.add(a=random_bits((5000,), torch.bfloat16), b=random_bits((1000,), torch.bfloat16))
    with pytest.raises(WeightsError, match="was altered"):
        policies.apply([path], 2, 1)


def test_a_base_with_other_bytes_than_its_digest_gives_an_error(small_pair: tuple[Policies, Path]) -> None:
    policies, path = small_pair
    file = policies.directory(0) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(WeightsError, match="was altered"):
        policies.apply([path], 0, 1)
    file.write_bytes(content[:-1])
    with pytest.raises(WeightsError, match="shorter than recorded"):
        policies.apply([path], 0, 1)
    file.unlink()
    with pytest.raises(WeightsError, match="cannot be applied"):
        policies.apply([path], 0, 1)


def test_an_old_delta_is_refused_in_place_of_a_newer_one(policies: Policies) -> None:
    tensor = random_bits((5000,), torch.bfloat16)
    for number in range(3):
        tensor[number] = 1.0
        policies.add(a=tensor)
    old, new = policies.write(0, 1), policies.write(1, 2)
    for paths, base in [([old], 1), ([old], 0), ([new, old], 1), ([old, old, new], 0), ([new], 0)]:
        with pytest.raises(WeightsError, match=r"was altered|cannot be applied"):
            policies.apply(paths, base, 2)


def test_a_delta_of_other_files_is_refused(small_pair: tuple[Policies, Path]) -> None:
    """The manifest says which files there are, so a delta can neither add nor leave out one."""
    policies, path = small_pair
    manifest = policies.manifests[1]
    policies.manifests[1] = msgspec.structs.replace(manifest, files={**manifest.files, "extra": manifest.files["config.json"]})
    with pytest.raises(WeightsError, match="cannot be applied"):
        policies.apply([path], 0, 1)
