import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from support.policy_servers import TOKEN, PolicyServer, publish_files
from trivet.config.layout import MANIFEST, RunLayout
from trivet.errors import ConfigError, FetchFailed, WeightsError
from trivet.storage.durable import list_files
from trivet.weights.catalog import discard_policies_after
from trivet.weights.fetch import STALL_TIMEOUT_S, PolicyCache, PolicyFetch
from trivet.weights.manifest import offer_policy, verify
from trivet.weights.sources import DirectorySource, HttpSource, PolicySource, Problem, SourceProblem
from trivet.wire.versions import FetchablePolicy

SIZE = 3 << 20
"""Three chunks, so that a transfer can break between them."""
CONTENT = random.Random(0).randbytes(SIZE)


class Clock:
    """A clock that only `sleep` moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ScriptedSource:
    """Gives the bytes of a directory, after the problems of a script."""

    def __init__(self, weights: Path, *problems: Problem) -> None:
        self._directory = DirectorySource(weights)
        self.problems = list(problems)

    def read(self, policy: FetchablePolicy, name: str, *, start: int) -> Generator[bytes]:
        if self.problems:
            raise SourceProblem(self.problems.pop(0))
        yield from self._directory.read(policy, name, start=start)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path / "run")


@pytest.fixture
def policy_directory(layout: RunLayout) -> Path:
    return publish_files(layout, 1, model=CONTENT, head=b"small")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PolicyCache]:
    made = make_cache(tmp_path / "cache")
    yield made
    made.close()


def make_cache(root: Path, *, run: str = "run", token: str = TOKEN) -> PolicyCache:
    return PolicyCache(root, run=run, make_source=lambda url: HttpSource(url, token=token, environ={}))


def fetch(cache: PolicyCache, policy: FetchablePolicy) -> Path:
    return cache.fetch(policy, max_bytes=1 << 30)


def assert_whole(directory: Path, published: Path) -> None:
    assert verify(directory) == verify(published)
    assert list_files(directory) == list_files(published)


def test_a_fetched_policy_is_the_published_one_and_private(policy_directory: Path, cache: PolicyCache) -> None:
    with PolicyServer(policy_directory.parent) as origin:
        directory = fetch(cache, offer_policy(policy_directory, sources=[origin.url]))
        assert directory == cache.directory / "step_1"
        assert_whole(directory, policy_directory)
        num_requests = len(origin.requests)
        assert fetch(cache, offer_policy(policy_directory, sources=[origin.url])) == directory
        assert len(origin.requests) == num_requests, "what is there is not fetched again"
    assert [directory.stat().st_mode & 0o077 for directory in (cache.directory, cache.directory.parent)] == [0, 0]


def test_a_broken_connection_is_resumed_where_it_broke(policy_directory: Path, cache: PolicyCache) -> None:
    breaks = itertools.count()

    def spoil(path: str, num_sent: int, body: bytes) -> bytes:
        if path.endswith("model.safetensors") and num_sent and next(breaks) < 2:
            raise ConnectionAbortedError("made up")
        return body

    with PolicyServer(policy_directory.parent, spoil=spoil) as origin:
        assert_whole(fetch(cache, offer_policy(policy_directory, sources=[origin.url])), policy_directory)
    ranges = [wanted for path, wanted in origin.requests if path.endswith("model.safetensors")]
    assert ranges[0] == ""
    starts = [int(wanted.removeprefix("bytes=").removesuffix("-")) for wanted in ranges[1:]]
    assert len(starts) == 2
    assert 0 < starts[0] < starts[1] < SIZE


def test_a_killed_process_is_resumed_by_the_next(policy_directory: Path, tmp_path: Path) -> None:
    """The process is killed with the first file half written. No directory has the final name then."""
    program = f"""
import os, signal, time
from pathlib import Path
from support.policy_servers import *
from trivet.weights.fetch import PolicyCache
from trivet.weights.manifest import offer_policy
from trivet.weights.sources import HttpSource
def spoil(path, num_sent, body):
    if path.endswith("model.safetensors") and num_sent:
        while not any(file.stat().st_size for file in cache.directory.glob(".step_1.*/model.safetensors.partial")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    return body
def make_source(url):
    return HttpSource(url, token=TOKEN, environ={{}})
cache = PolicyCache(Path({str(tmp_path / "cache")!r}), run="run", make_source=make_source)
with PolicyServer(Path({str(policy_directory.parent)!r}), spoil=spoil) as origin:
    cache.fetch(offer_policy(Path({str(policy_directory)!r}), sources=[origin.url]), max_bytes=1 << 30)
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", program], env=environ, timeout=60, check=False).returncode == -9
    directory = tmp_path / "cache" / "run"
    assert not (directory / "step_1").exists()
    assert list(directory.glob(".step_1.*/model.safetensors.partial"))
    cache = make_cache(tmp_path / "cache")
    with PolicyServer(policy_directory.parent) as origin:
        assert_whole(fetch(cache, offer_policy(policy_directory, sources=[origin.url])), policy_directory)
    assert next(wanted for path, wanted in origin.requests if path.endswith("model.safetensors")).startswith("bytes=")
    cache.close()


def test_a_source_whose_bytes_were_altered_on_the_wire_is_not_asked_again(policy_directory: Path, cache: PolicyCache) -> None:
    def flip(path: str, num_sent: int, body: bytes) -> bytes:
        is_first = path.endswith("model.safetensors") and not num_sent
        return bytes([body[0] ^ 1, *body[1:]]) if is_first else body

    with PolicyServer(policy_directory.parent, spoil=flip) as bad, PolicyServer(policy_directory.parent) as good:
        assert_whole(fetch(cache, offer_policy(policy_directory, sources=[bad.url, good.url])), policy_directory)
        assert sum(path.endswith("model.safetensors") for path, _ in bad.requests) <= 1
        (cache.directory / "step_1").rename(cache.directory / "gone")
        with pytest.raises(
            FetchFailed, match=r"no source of policy 1 is usable: .*model.safetensors is not what was published"
        ):
            fetch(cache, offer_policy(policy_directory, sources=[bad.url]))
    assert not (cache.directory / "step_1").exists()


@pytest.mark.parametrize("spoiled", [MANIFEST, "model.safetensors"])
def test_an_altered_or_longer_file_is_never_taken(policy_directory: Path, cache: PolicyCache, spoiled: str) -> None:
    policy = offer_policy(policy_directory, sources=["origin"])
    path = policy_directory / spoiled
    content = path.read_bytes()
    cache._make_source = lambda _: DirectorySource(policy_directory.parent)
    for altered in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1], content + b"x", b""):
        path.write_bytes(altered)
        with pytest.raises(FetchFailed, match="no source of policy 1 is usable"):
            fetch(cache, policy)
    path.write_bytes(content)
    assert_whole(fetch(cache, policy), policy_directory)


def test_a_bit_that_flips_in_the_cache_is_found_and_fetched_again(policy_directory: Path, cache: PolicyCache) -> None:
    with PolicyServer(policy_directory.parent) as origin:
        policy = offer_policy(policy_directory, sources=[origin.url])
        for _ in range(2):
            directory = fetch(cache, policy)
            assert_whole(directory, policy_directory)
            (directory / "model.safetensors").write_bytes(b"x" + CONTENT[1:])


def test_a_reader_serves_what_it_has_to_others_while_the_origin_is_busy_or_gone(policy_directory: Path, tmp_path: Path) -> None:
    first, second = (make_cache(tmp_path / f"machine-{index}") for index in range(2))
    with PolicyServer(policy_directory.parent) as origin:
        fetch(first, offer_policy(policy_directory, sources=[origin.url]))
    with PolicyServer(first.directory) as peer, PolicyServer(policy_directory.parent, max_transfers=0) as busy:
        for source in (busy.url, origin.url):
            assert_whole(fetch(second, offer_policy(policy_directory, sources=[source, peer.url])), policy_directory)
            second.close()
    first.close()


def test_another_secret_is_refused_and_nothing_is_fetched(policy_directory: Path, tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", token="another")
    refused = pytest.raises(FetchFailed, match="is not usable: it answers with status 401")
    with PolicyServer(policy_directory.parent) as origin, refused:
        fetch(cache, offer_policy(policy_directory, sources=[origin.url]))
    assert not (cache.directory / "step_1").exists()
    assert not any(path.stat().st_size for path in cache.directory.rglob("*") if path.is_file())
    cache.close()


def test_a_full_disk_is_an_error_that_names_the_key_and_leaves_room(policy_directory: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes a write fail with EFBIG in a process of its own, as ENOSPC would."""
    program = f"""
import resource, signal
from pathlib import Path
from trivet.weights.fetch import PolicyCache
from trivet.weights.manifest import offer_policy
from trivet.weights.sources import DirectorySource
weights = Path({str(policy_directory.parent)!r})
cache = PolicyCache(Path({str(tmp_path / "cache")!r}), run="run", make_source=lambda _: DirectorySource(weights))
policy = offer_policy(weights / "step_1", sources=["origin"])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 30))
try:
    cache.fetch(policy, max_bytes=1 << 30)
except Exception as error:
    print(type(error).__name__, error)
print(sorted(path.name for path in cache.directory.iterdir()))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
print(cache.fetch(policy, max_bytes=1 << 30).name)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    error, left, again = found.stdout.splitlines()
    assert error.startswith("FetchFailed policy 1 could not be written below")
    assert "inference.weight_cache" in error
    assert (left, again) == ("['.lock']", "step_1")


def test_a_larger_policy_than_the_server_loads_is_refused_before_its_files_are_fetched(
    policy_directory: Path, cache: PolicyCache
) -> None:
    refused = pytest.raises(WeightsError, match=r"has \d+ bytes, more than the 100 allowed")
    with PolicyServer(policy_directory.parent) as origin, refused:
        cache.fetch(offer_policy(policy_directory, sources=[origin.url]), max_bytes=100)
    assert {path.rpartition("/")[2] for path, _ in origin.requests} == {MANIFEST}


def test_the_served_policy_and_the_one_before_stay_and_older_ones_go(layout: RunLayout, tmp_path: Path) -> None:
    cache, other = make_cache(tmp_path / "cache"), make_cache(tmp_path / "cache")
    for version in range(1, 6):
        publish_files(layout, version, model=bytes([version]))
    with PolicyServer(layout.weights) as origin:
        policies = {version: offer_policy(layout.weights_step(version), sources=[origin.url]) for version in range(1, 6)}
        fetch(other, policies[1])
        other.settle(policies[1].version)
        for version in range(1, 5):
            fetch(cache, policies[version])
            cache.settle(policies[version].version)
        fetch(cache, policies[5])
    # Another server of the machine serves step_1. A load of step_5 that fails goes back to step_4.
    assert {path.name for path in cache.directory.glob("step_*")} == {"step_1", "step_3", "step_4", "step_5"}
    cache.close()
    assert other.directory.exists()
    other.close()
    assert list(other.directory.parent.iterdir()) == []


def test_servers_of_a_machine_fetch_once(policy_directory: Path, tmp_path: Path) -> None:
    caches = [make_cache(tmp_path / "cache") for _ in range(4)]
    with PolicyServer(policy_directory.parent) as origin:
        policy = offer_policy(policy_directory, sources=[origin.url])
        threads = [threading.Thread(target=fetch, args=(cache, policy)) for cache in caches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len([path for path, _ in origin.requests if path.endswith("model.safetensors")]) == 1
    for cache in caches:
        assert_whole(cache.directory / "step_1", policy_directory)
        cache.close()


def test_a_version_that_a_resumed_run_publishes_again_replaces_the_old_one(layout: RunLayout, cache: PolicyCache) -> None:
    with PolicyServer(layout.weights) as origin:
        for content in (b"first", b"second"):
            directory = publish_files(layout, 1, model=content)
            assert_whole(fetch(cache, offer_policy(directory, sources=[origin.url])), directory)
            discard_policies_after(layout, 0)


def test_a_fetch_ends_when_another_policy_is_wanted(policy_directory: Path, cache: PolicyCache) -> None:
    policy = offer_policy(policy_directory, sources=["origin"])

    def want_another(path: Path) -> PolicySource:
        cache._wanted = None
        return DirectorySource(policy_directory.parent)

    cache._make_source = want_another
    with pytest.raises(FetchFailed, match="another one is wanted"):
        fetch(cache, policy)


def test_caches_of_other_runs_are_removed_unless_a_server_uses_them(policy_directory: Path, tmp_path: Path) -> None:
    first, second, third = (make_cache(tmp_path / "cache", run=f"run-{index}") for index in range(3))
    with PolicyServer(policy_directory.parent) as origin:
        policy = offer_policy(policy_directory, sources=[origin.url])
        for cache in (first, second):
            fetch(cache, policy)
        os.close(second._run_lock or 0)  # as if its process had been killed
        second._run_lock = None
        fetch(third, policy)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"run-0", "run-2"}
    for cache in (first, second, third):
        cache.close()


def test_a_cache_of_another_user_is_refused(policy_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    cache = make_cache(tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"belongs to another user.*inference\.weight_cache"):
        fetch(cache, offer_policy(policy_directory, sources=["http://127.0.0.1:1"]))


def follow(source: PolicySource, policy: FetchablePolicy, into: Path) -> Clock:
    clock = Clock()
    into.mkdir()
    PolicyFetch(
        policy, into, {policy.sources[0]: source}, rng=random.Random(0), clock=clock, sleep=clock.sleep
    ).fetch_manifest()
    return clock


def test_a_busy_source_is_waited_for_longer_than_a_silent_one(policy_directory: Path, tmp_path: Path) -> None:
    policy = offer_policy(policy_directory, sources=["origin"])
    busy = ScriptedSource(policy_directory.parent, *[Problem.BUSY] * 500)
    assert follow(busy, policy, tmp_path / "busy").now > STALL_TIMEOUT_S
    silent = ScriptedSource(policy_directory.parent, *[Problem.BROKEN] * 500)
    with pytest.raises(FetchFailed, match="no source has given a byte of policy 1 for 120 s: origin cannot be read"):
        follow(silent, policy, tmp_path / "silent")


def test_a_policy_that_was_removed_is_given_up_after_seconds(policy_directory: Path, tmp_path: Path) -> None:
    policy = offer_policy(policy_directory, sources=["origin"])
    absent = ScriptedSource(policy_directory.parent, *[Problem.ABSENT] * 500)
    with pytest.raises(FetchFailed, match="policy 1 was removed"):
        follow(absent, policy, tmp_path / "absent")
    assert len(absent.problems) > 400
    back = ScriptedSource(policy_directory.parent, Problem.ABSENT, Problem.BROKEN, Problem.ABSENT)
    follow(back, policy, tmp_path / "back")
