"""Which published policies have a delta, and that a server which fetches by deltas ends with what was published."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from support.policy_servers import TOKEN, PolicyServer
from trivet.config.layout import RunLayout
from trivet.errors import FetchFailed
from trivet.storage.durable import hash_file
from trivet.weights import delta as delta_module
from trivet.weights import publish as publish_module
from trivet.weights.fetch import PolicyCache
from trivet.weights.manifest import Manifest, offer_policy, read_manifest, verify
from trivet.weights.publish import DeltaPublisher, publish
from trivet.weights.retention import retire
from trivet.wire.versions import PolicyVersion

WEIGHTS = np.random.default_rng(0).integers(0, 2**16, 100_000, dtype=np.uint16)
MODEL = "model.safetensors"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_module, "_CHUNK_BYTES", 1 << 16)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path / "run")


@pytest.fixture
def deltas(layout: RunLayout) -> DeltaPublisher:
    return DeltaPublisher(layout, 50)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PolicyCache]:
    made = PolicyCache(tmp_path / "cache", run="run", token=TOKEN, environ={})
    yield made
    made.close()


def publish_version(deltas: DeltaPublisher, version: int, *, num_changed: int = 100, seed: int | None = None) -> Manifest:
    """Publish a policy that differs from the start in some values, others for each version."""
    content = WEIGHTS.copy()
    rng = np.random.default_rng(version if seed is None else seed)
    content[rng.integers(0, len(content), num_changed)] = rng.integers(0, 2**16, num_changed, dtype=np.uint16)

    def write(directory: Path) -> None:
        (directory / MODEL).write_bytes(content.tobytes())
        (directory / "config.json").write_text("{}")

    return publish(deltas.layout, version=PolicyVersion(version), run_id="run", write=write, deltas=deltas)


def versions_with_delta(layout: RunLayout, versions: Sequence[int]) -> list[int]:
    """Return the versions that have a delta from the version before. Those have exactly the deltas in their manifests."""
    found: list[int] = []
    for version in versions:
        directory = layout.weights_step(version)
        deltas = verify(directory).deltas
        assert {path.name for path in directory.glob("*.delta")} == {delta.name for delta in deltas}
        assert [delta.base_version for delta in deltas] == list(range(version - len(deltas), version))
        for delta in deltas:
            assert hash_file(directory / delta.name) == delta.file
        found += [version] if deltas else []
    return found


def test_all_but_the_first_and_every_fiftieth_have_a_delta(layout: RunLayout, deltas: DeltaPublisher) -> None:
    for version in range(46, 54):
        publish_version(deltas, version)
    assert versions_with_delta(layout, range(46, 54)) == [47, 48, 49, 51, 52, 53]
    assert [len(read_manifest(layout.weights_step(version)).deltas) for version in range(46, 54)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_the_digest_of_a_policy_does_not_depend_on_its_delta(layout: RunLayout, deltas: DeltaPublisher) -> None:
    publish_version(deltas, 1)
    with_delta = publish_version(deltas, 2)
    without = publish_version(DeltaPublisher(layout, 50), 2)
    assert with_delta.deltas
    assert not without.deltas
    assert with_delta.digest == without.digest
    assert with_delta.files.keys() == {MODEL, "config.json"}


def test_a_manifest_names_the_newest_deltas_that_lead_to_it(layout: RunLayout, deltas: DeltaPublisher) -> None:
    manifests = [publish_version(deltas, version) for version in range(1, 14)]
    newest = manifests[-1].deltas
    assert [record.base_version for record in newest] == list(range(5, 13))
    assert [record.base_digest for record in newest] == [manifest.digest for manifest in manifests[4:12]]
    assert versions_with_delta(layout, range(1, 14)) == list(range(2, 14))
    for version in range(1, 13):  # older deltas stay, and take no space twice, after the policies that they made are removed
        retire(layout, PolicyVersion(version))
    assert versions_with_delta(layout, [13]) == [13]


def test_too_large_a_delta_is_left_out_and_the_next_ones_too(layout: RunLayout) -> None:
    deltas = DeltaPublisher(layout, 4)
    for version in range(1, 10):
        publish_version(deltas, version, num_changed=1_000_000 if version == 2 else 10)
    # 2 and its neighbour differ in everything; 4 and 8 are anchors; 3 and 5 come too soon after the failure.
    assert versions_with_delta(layout, range(1, 10)) == [6, 7, 9]
    assert read_manifest(layout.weights_step(6)).deltas[0].base_version == 5


def test_a_removed_base_or_a_republished_version_costs_no_more_than_the_delta(
    layout: RunLayout, deltas: DeltaPublisher
) -> None:
    publish_version(deltas, 1)
    retire(layout, PolicyVersion(1))
    assert not publish_version(deltas, 2).deltas
    assert not publish_version(deltas, 2).deltas
    assert versions_with_delta(layout, [2]) == []


def test_a_failing_disk_costs_no_more_than_the_delta(
    layout: RunLayout, deltas: DeltaPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(base: Path, directory: Path, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    publish_version(deltas, 1)
    monkeypatch.setattr(publish_module, "write_delta", fail)
    assert not publish_version(deltas, 2).deltas
    assert versions_with_delta(layout, [1, 2]) == []


def fetch(cache: PolicyCache, origin: PolicyServer, directory: Path, *others: PolicyServer) -> list[str]:
    """Fetch a policy, compare it with the published one, and return the names of the files that were requested."""
    num_before = len(origin.requests)
    sources = [server.url for server in (origin, *others)]
    policy = offer_policy(directory, sources=sources)
    found = cache.fetch(policy, max_bytes=1 << 30)
    cache.settle(found)
    assert verify(found) == verify(directory)
    for name in (MODEL, "config.json"):
        assert (found / name).read_bytes() == (directory / name).read_bytes()
    assert not [path for path in cache.directory.iterdir() if path.name.endswith(".partial")]
    return [path.split("/", 4)[2] + "/" + path.split("/", 4)[4] for path, _ in origin.requests[num_before:]]


def test_a_server_with_the_base_fetches_the_delta_alone(layout: RunLayout, deltas: DeltaPublisher, cache: PolicyCache) -> None:
    for version in (1, 2, 3):
        publish_version(deltas, version)
    with PolicyServer(layout.weights) as origin:
        assert f"1/{MODEL}" in fetch(cache, origin, layout.weights_step(1))
        for version in (2, 3):
            assert fetch(cache, origin, layout.weights_step(version)) == [
                f"{version}/manifest.json",
                f"{version}/from_{version - 1}.delta",
            ]


def test_a_server_that_skipped_versions_fetches_their_deltas(
    layout: RunLayout, deltas: DeltaPublisher, cache: PolicyCache
) -> None:
    for version in range(1, 6):
        publish_version(deltas, version)
    with PolicyServer(layout.weights) as origin:
        fetch(cache, origin, layout.weights_step(1))
        requested = fetch(cache, origin, layout.weights_step(5))
    assert requested == ["5/manifest.json", *(f"5/from_{base}.delta" for base in range(1, 5))]


def test_deltas_that_together_are_too_large_are_left_out(layout: RunLayout, deltas: DeltaPublisher, cache: PolicyCache) -> None:
    newest = [publish_version(deltas, version, num_changed=5_000) for version in range(1, 6)][-1]
    assert 1 < len(newest.deltas) < 4
    assert sum(delta.file.num_bytes for delta in newest.deltas) <= 0.6 * newest.num_bytes
    assert versions_with_delta(layout, [5]) == [5]
    with PolicyServer(layout.weights) as origin:
        fetch(cache, origin, layout.weights_step(1))
        assert f"5/{MODEL}" in fetch(cache, origin, layout.weights_step(5))
        assert not [path for path, _ in origin.requests if path.endswith(".delta")]


def test_servers_pass_deltas_on(layout: RunLayout, deltas: DeltaPublisher, cache: PolicyCache, tmp_path: Path) -> None:
    for version in (1, 2):
        publish_version(deltas, version)
    other = PolicyCache(tmp_path / "other", run="run", token=TOKEN, environ={})
    with PolicyServer(layout.weights) as origin, PolicyServer(cache.directory) as peer:
        for version in (1, 2):
            fetch(cache, origin, layout.weights_step(version))
        fetch(other, origin, layout.weights_step(1))
        assert fetch(other, peer, layout.weights_step(2)) == ["2/manifest.json", "2/from_1.delta"]
    other.close()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def damage_base(layout: RunLayout, cache: PolicyCache) -> None:
    damage(cache.directory / "step_1" / MODEL)


def cut_base(layout: RunLayout, cache: PolicyCache) -> None:
    (cache.directory / "step_1" / MODEL).write_bytes(b"x")


def damage_delta(layout: RunLayout, cache: PolicyCache) -> None:
    damage(layout.weights_step(2) / "from_1.delta")


def remove_delta(layout: RunLayout, cache: PolicyCache) -> None:
    (layout.weights_step(2) / "from_1.delta").unlink()


def replay_older_delta(layout: RunLayout, cache: PolicyCache) -> None:
    shutil.copy(layout.weights_step(2) / "from_0.delta", layout.weights_step(2) / "from_1.delta")


@pytest.mark.parametrize("fault", [damage_base, cut_base, damage_delta, replay_older_delta, remove_delta])
def test_any_damage_leads_to_a_whole_fetch(
    layout: RunLayout,
    deltas: DeltaPublisher,
    cache: PolicyCache,
    fault: Callable[[RunLayout, PolicyCache], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trivet.weights.fetch.STALL_TIMEOUT_S", 0.0)
    for version in (0, 1, 2):
        publish_version(deltas, version)
    with PolicyServer(layout.weights) as origin:
        fetch(cache, origin, layout.weights_step(1))
        fault(layout, cache)
        assert f"2/{MODEL}" in fetch(cache, origin, layout.weights_step(2))


def test_a_delta_altered_on_the_wire_is_taken_from_another_source(
    layout: RunLayout, deltas: DeltaPublisher, cache: PolicyCache
) -> None:
    for version in (1, 2):
        publish_version(deltas, version)

    def flip(path: str, num_sent: int, body: bytes) -> bytes:
        return bytes([body[0] ^ 1, *body[1:]]) if path.endswith(".delta") and not num_sent else body

    with PolicyServer(layout.weights, spoil=flip) as bad, PolicyServer(layout.weights) as good:
        fetch(cache, good, layout.weights_step(1))
        fetch(cache, bad, layout.weights_step(2), good)
        assert not [path for path, _ in good.requests if path.endswith(f"2/{MODEL}")]


def test_a_policy_that_is_no_longer_wanted_ends_the_fetch_of_its_delta(
    layout: RunLayout, deltas: DeltaPublisher, cache: PolicyCache
) -> None:
    for version in (1, 2):
        publish_version(deltas, version)
    with PolicyServer(layout.weights) as origin:
        fetch(cache, origin, layout.weights_step(1))

        def forget(path: str, num_sent: int, body: bytes) -> bytes:
            if path.endswith(".delta"):
                cache._wanted = None
            return body

        origin._spoil = forget
        with pytest.raises(FetchFailed, match="not fetched any more"):
            cache.fetch(offer_policy(layout.weights_step(2), sources=[origin.url]), max_bytes=1 << 30)
    assert not (cache.directory / "step_2").exists()
