"""Findings: keys get the user's names when a finding is shown, and every problem is listed once."""

import pytest

from trivet.config.findings import ROOT, ConfigFinding, Findings, Key
from trivet.errors import ConfigError

NAMES = {"seq_len": "trainer.args.max_seq_len", "trainer.model.seq_len": "trainer.args.max_seq_len"}


def name_of(key: str) -> str:
    return NAMES.get(key, key)


def test_a_key_is_shown_by_the_users_name_and_a_value_that_looks_like_it_stays() -> None:
    finding = ConfigFinding(f"{ROOT.seq_len} (seq_len) must be <= {ROOT.env[0].limit} (trainer.model.seq_len)")
    assert finding.keys == ("seq_len", "env.0.limit")
    assert finding.show() == "seq_len (seq_len) must be <= env.0.limit (trainer.model.seq_len)"
    assert finding.show(name_of) == "trainer.args.max_seq_len (seq_len) must be <= env.0.limit (trainer.model.seq_len)"


def test_a_key_below_another_has_both_names() -> None:
    assert ConfigFinding(f"{Key('trainer', 'model').seq_len}").keys == ConfigFinding(f"{Key('trainer.model')['seq_len']}").keys


def test_problems_are_raised_together_each_once() -> None:
    findings = Findings(name_of=name_of)
    findings.raise_problems()
    for key in (ROOT.seq_len, ROOT.trainer.model.seq_len, ROOT.max_steps):
        findings.refuse(f"{key} is wrong")
    with pytest.raises(ConfigError) as caught:
        findings.raise_problems()
    assert str(caught.value) == "2 problems in the configuration:\n- trainer.args.max_seq_len is wrong\n- max_steps is wrong"


def test_problems_beyond_what_anybody_reads_are_counted() -> None:
    findings = Findings()
    for number in range(53):
        findings.refuse(f"problem {number}")
    with pytest.raises(ConfigError, match="53 problems in the configuration") as caught:
        findings.raise_problems()
    assert str(caught.value).endswith("- problem 49\n- and 3 more")
