import itertools
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from trivet.wire.versions import PolicyVersion, VersionRun, count_tokens, join_versions

versions = st.lists(st.integers(0, 5), max_size=40)


def encode_versions(versions: Iterable[int]) -> list[VersionRun]:
    """Run-length encode one version per token, in token order."""
    runs: list[VersionRun] = []
    for version in versions:
        if runs and runs[-1].version == version:
            runs[-1] = VersionRun(runs[-1].version, runs[-1].length + 1)
        else:
            runs.append(VersionRun(PolicyVersion(version), 1))
    return runs


def expand(runs):
    return [run.version for run in runs for _ in range(run.length)]


@given(versions)
def test_encoding_keeps_every_tokens_version_in_the_fewest_runs(per_token):
    runs = encode_versions(per_token)
    assert expand(runs) == per_token
    assert count_tokens(runs) == len(per_token)
    assert all(left.version != right.version for left, right in itertools.pairwise(runs))


@given(st.lists(versions, max_size=5))
def test_joining_is_encoding_the_concatenation(parts):
    assert join_versions(map(encode_versions, parts)) == encode_versions(version for part in parts for version in part)


def test_empty_runs_vanish_when_joined():
    assert join_versions([[VersionRun(1, 0)], [VersionRun(2, 3), VersionRun(1, 0)], [VersionRun(2, 1)]]) == [VersionRun(2, 4)]
