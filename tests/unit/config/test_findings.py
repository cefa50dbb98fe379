"""Findings name keys as the user does, and list every problem once."""

from collections.abc import Iterator

import pytest

from trivet.config.findings import ROOT, Findings, Key
from trivet.errors import ConfigError
from trivet.key_names import use_names


@pytest.fixture(autouse=True)
def users_names() -> Iterator[None]:
    with use_names({"seq_len": "trainer.args.max_seq_len", "trainer.model.seq_len": "trainer.args.max_seq_len"}):
        yield


def test_the_text_of_a_key_is_the_users_name_of_it() -> None:
    assert str(ROOT.seq_len) == str(Key("trainer")["model"].seq_len) == "trainer.args.max_seq_len"
    assert str(ROOT.env[0].limit) == "env.0.limit"


def test_problems_are_raised_together_each_once() -> None:
    findings = Findings()
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
