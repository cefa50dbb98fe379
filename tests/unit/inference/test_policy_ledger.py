from trivet.inference.policy_ledger import PolicyLedger, TokenVersions
from trivet.wire.versions import PolicyVersion, VersionRun


def test_a_token_belongs_to_the_last_policy_switched_to_before_it() -> None:
    ledger = PolicyLedger()
    ledger.switch(PolicyVersion(1), at=10.0)
    ledger.switch(PolicyVersion(2), at=20.0)
    assert [ledger.version_at(time) for time in (0.0, 9.9, 10.0, 19.9, 20.0, 99.0)] == [0, 0, 1, 1, 2, 2]


def test_a_token_that_arrives_late_is_counted_to_the_policy_that_made_it() -> None:
    ledger = PolicyLedger()
    made_at = 5.0
    ledger.switch(PolicyVersion(1), at=10.0)
    assert ledger.version_at(made_at) == 0


def test_going_back_to_an_earlier_policy_is_a_switch_like_any_other() -> None:
    ledger = PolicyLedger()
    ledger.switch(PolicyVersion(1), at=1.0)
    ledger.switch(PolicyVersion(0), at=2.0)
    assert (ledger.current, ledger.num_switches, ledger.version_at(3.0)) == (0, 2, 0)


def test_versions_are_run_length_encoded_for_each_completion_of_a_request() -> None:
    versions = TokenVersions()
    versions.record(0, num_tokens=2, version=PolicyVersion(4))
    versions.record(1, num_tokens=1, version=PolicyVersion(4))
    versions.record(0, num_tokens=1, version=PolicyVersion(4))
    versions.record(0, num_tokens=1, version=PolicyVersion(5))
    assert versions.runs == {
        0: [VersionRun(PolicyVersion(4), 3), VersionRun(PolicyVersion(5), 1)],
        1: [VersionRun(PolicyVersion(4), 1)],
    }
