"""Findings name keys as the user does, and list every problem once."""

import pytest

from trivet.config.findings import Findings
from trivet.errors import ConfigError

NAMES = {"seq_len": "trainer.args.max_seq_len", "trainer.model.seq_len": "trainer.args.max_seq_len"}


def name_of(key: str) -> str:
    return NAMES.get(key, key)


def test_the_text_of_a_key_is_the_users_name_of_it() -> None:
    at = Findings(name_of=name_of).key()
    assert [str(key) for key in (at.seq_len, at.env[0].limit, at.env.root.trainer["model"].seq_len)] == [
        "trainer.args.max_seq_len",
        "env.0.limit",
        "trainer.args.max_seq_len",
    ]


def test_problems_are_raised_together_each_once() -> None:
    findings = Findings(name_of=name_of)
    findings.raise_problems()
    for key in ("seq_len", "trainer.model.seq_len", "max_steps"):
        findings.refuse(f"{findings.key(key)} is wrong")
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
