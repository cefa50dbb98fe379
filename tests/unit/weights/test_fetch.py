import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send

from support.policy_servers import TOKEN, PolicyServer, publish_files
from support.processes import wait_until
from trivet.config.layout import MANIFEST, RunLayout
from trivet.errors import ConfigError, FetchFailed, WeightsError
from trivet.storage.durable import list_files
from trivet.weights.catalog import discard_policies_after
from trivet.weights.fetch import STALL_TIMEOUT_S, Download, PolicyCache
from trivet.weights.manifest import offer_policy, verify
from trivet.wire.versions import FetchablePolicy

SIZE = 3 << 22
"""Three chunks, so that a transfer can break between them."""
CONTENT = random.Random(0).randbytes(SIZE)


class Clock:
    """A clock that only `sleep` moves. It calls a function at a given time."""

    now = 0.0

    def __init__(self, at: float = float("inf"), change: Callable[[], object] = lambda: None) -> None:
        self._at = at
        self._change = change

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if self.now < self._at <= self.now + seconds:
            self._change()
        self.now += seconds


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
    return PolicyCache(root, run=run, token=token, environ={})


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
    starts = [int(wanted.removeprefix("bytes=").removesuffix("-")) for wanted in ranges]
    assert len(starts) == 3
    assert 0 == starts[0] < starts[1] < starts[2] < SIZE


def test_a_file_is_resumed_from_another_source_when_one_falls_silent(
    policy_directory: Path, cache: PolicyCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet.weights.fetch._TIMEOUT", httpx.Timeout(1.0))
    ended = threading.Event()

    def fall_silent(path: str, num_sent: int, body: bytes) -> bytes:
        if path.endswith("model.safetensors") and num_sent:
            other.files._transfers.release()
            ended.wait(60)
        return body

    with (
        PolicyServer(policy_directory.parent, max_transfers=0) as other,
        PolicyServer(policy_directory.parent, spoil=fall_silent) as silent,
    ):
        try:
            assert_whole(fetch(cache, offer_policy(policy_directory, sources=[silent.url, other.url])), policy_directory)
        finally:
            ended.set()
    assert {wanted for _, wanted in other.requests} != {"bytes=0-"}, "the second half came from the other"


def test_an_answer_without_its_length_is_read_to_the_end(policy_directory: Path, cache: PolicyCache) -> None:
    """A proxy may send the body in chunks of its own."""
    with PolicyServer(policy_directory.parent) as origin:
        app = origin._app

        async def serve_chunked(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_chunked(message: Message) -> None:
                headers: list[tuple[bytes, bytes]] = message.pop("headers", [])
                await send({**message, "headers": [pair for pair in headers if pair[0] != b"content-length"]})

            await app(scope, receive, send_chunked)

        origin._app = serve_chunked
        assert_whole(fetch(cache, offer_policy(policy_directory, sources=[origin.url])), policy_directory)


def test_a_killed_process_is_resumed_by_the_next(policy_directory: Path, tmp_path: Path) -> None:
    """The process is killed with the first file half written. No directory has the final name then."""
    program = f"""
import os, signal, time
from pathlib import Path
from support.policy_servers import *
from trivet.weights.fetch import PolicyCache
from trivet.weights.manifest import offer_policy
def spoil(path, num_sent, body):
    if path.endswith("model.safetensors") and num_sent:
        while not any(file.stat().st_size for file in cache.directory.glob(".step_1.*/model.safetensors.partial")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    return body
cache = PolicyCache(Path({str(tmp_path / "cache")!r}), run="run", token=TOKEN, environ={{}})
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
    starts = [wanted for path, wanted in origin.requests if path.endswith("model.safetensors")]
    assert len(starts) == 1
    assert starts != ["bytes=0-"]
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
            FetchFailed, match=r"no source of policy 1 is usable: .*its model.safetensors is not what was published"
        ):
            fetch(cache, offer_policy(policy_directory, sources=[bad.url]))
    assert not (cache.directory / "step_1").exists()


@pytest.mark.parametrize("spoiled", [MANIFEST, "model.safetensors"])
def test_an_altered_or_longer_file_is_never_taken(policy_directory: Path, cache: PolicyCache, spoiled: str) -> None:
    content = (policy_directory / spoiled).read_bytes()
    with PolicyServer(policy_directory.parent) as origin:
        # The altered manifest is served too.
        origin.files._find = lambda name, **_: (policy_directory / name, (policy_directory / name).lstat())
        policy = offer_policy(policy_directory, sources=[origin.url])
        for altered in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1], content + b"x", b""):
            (policy_directory / spoiled).write_bytes(altered)
            with pytest.raises(FetchFailed, match="no source of policy 1 is usable"):
                fetch(cache, policy)
        (policy_directory / spoiled).write_bytes(content)
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
    refused = pytest.raises(FetchFailed, match=r"no source of policy 1 is usable: .*401 Unauthorized")
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
import msgspec
from support.policy_servers import TOKEN
from trivet.weights.fetch import PolicyCache
from trivet.wire.versions import FetchablePolicy
cache = PolicyCache(Path({str(tmp_path / "cache")!r}), run="run", token=TOKEN, environ={{}})
policy = msgspec.json.decode(input(), type=FetchablePolicy)
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
    with PolicyServer(policy_directory.parent) as origin:
        policy = msgspec.json.encode(offer_policy(policy_directory, sources=[origin.url]))
        command, environ = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        found = subprocess.run(command, input=policy, env=environ, capture_output=True, timeout=60, check=True)
    error, left, again = found.stdout.decode().splitlines()
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


def test_the_served_policy_and_those_that_may_be_loaded_stay_and_older_ones_go(layout: RunLayout, tmp_path: Path) -> None:
    cache, other = make_cache(tmp_path / "cache"), make_cache(tmp_path / "cache")
    for version in range(1, 6):
        publish_files(layout, version, model=bytes([version]))
    with PolicyServer(layout.weights) as origin:
        policies = {version: offer_policy(layout.weights_step(version), sources=[origin.url]) for version in range(1, 6)}
        other.settle(fetch(other, policies[1]))
        for version in range(1, 4):
            cache.settle(fetch(cache, policies[version]))
        for version in (4, 5):
            fetch(cache, policies[version])
        # Another server of the machine serves step_1. If the loads of step_4 and step_5 fail, step_3 is served again.
        assert {path.name for path in cache.directory.glob("step_*")} == {"step_1", "step_3", "step_4", "step_5"}
        cache.settle(cache.directory / "step_4")
        fetch(cache, policies[3])
        assert {path.name for path in cache.directory.glob("step_*")} == {"step_1", "step_3", "step_4", "step_5"}
        cache.settle(cache.directory / "step_3")
        fetch(cache, policies[2])
        assert {path.name for path in cache.directory.glob("step_*")} == {"step_1", "step_2", "step_3"}
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
    def want_another(path: str, num_sent: int, body: bytes) -> bytes:
        cache._wanted = None
        return body

    another = pytest.raises(FetchFailed, match="another one is wanted")
    with PolicyServer(policy_directory.parent, spoil=want_another) as origin, another:
        fetch(cache, offer_policy(policy_directory, sources=[origin.url]))


def test_a_server_that_waits_for_another_one_of_its_machine_stops_when_another_policy_is_wanted(
    policy_directory: Path, tmp_path: Path
) -> None:
    first, second = make_cache(tmp_path / "cache"), make_cache(tmp_path / "cache")
    errors: list[FetchFailed] = []

    def fetch_second() -> None:
        try:
            fetch(second, policy)
        except FetchFailed as exc:
            errors.append(exc)

    with PolicyServer(policy_directory.parent) as origin:
        policy = offer_policy(policy_directory, sources=[origin.url])
        first._open()
        with first._locked(policy):
            thread = threading.Thread(target=fetch_second)
            thread.start()
            wait_until(lambda: second._run_lock is not None, timeout_s=60, waiting_for="the second server")
            second._wanted = None
            thread.join(60)
            assert [str(error) for error in errors] == ["policy 1 is not fetched any more, because another one is wanted"]
    assert origin.requests == []
    first.close()
    second.close()


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


def follow(policy: FetchablePolicy, into: Path, clock: Clock) -> float:
    """Fetch the manifest; return the time at which it was there."""
    into.mkdir()
    Download(
        policy=policy,
        directory=into,
        token=TOKEN,
        environ={},
        require_wanted=lambda: None,
        rng=random.Random(0),
        clock=clock,
        sleep=clock.sleep,
    ).fetch_manifest()
    return clock.now


def test_a_busy_source_is_waited_for_longer_than_a_silent_one(policy_directory: Path, tmp_path: Path) -> None:
    with PolicyServer(policy_directory.parent, max_transfers=0) as origin:
        policy = offer_policy(policy_directory, sources=[origin.url])
        clock = Clock(3 * STALL_TIMEOUT_S, origin.files._transfers.release)
        assert follow(policy, tmp_path / "busy", clock) >= 3 * STALL_TIMEOUT_S
    with pytest.raises(FetchFailed, match=r"no source has given a byte of policy 1 for 120 s: http.*ConnectError"):
        follow(policy, tmp_path / "gone", Clock())


def test_a_policy_that_was_removed_is_given_up_and_one_that_comes_back_is_not(policy_directory: Path, tmp_path: Path) -> None:
    with PolicyServer(policy_directory.parent) as origin:
        policy, away = offer_policy(policy_directory, sources=[origin.url]), tmp_path / "away"
        policy_directory.rename(away)
        with pytest.raises(FetchFailed, match=r"no source has given a byte of policy 1 for 120 s: http.*404 Not Found"):
            follow(policy, tmp_path / "removed", Clock())
        clock = Clock(STALL_TIMEOUT_S / 2, lambda: away.rename(policy_directory))
        assert STALL_TIMEOUT_S / 2 <= follow(policy, tmp_path / "back", clock) < STALL_TIMEOUT_S
