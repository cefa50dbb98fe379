from pathlib import Path

import pytest

from trivet.config.check_files import file_problems, looks_local
from trivet.config.load import load_config
from trivet.config.schema.sft import FakeDataConfig, SftConfig, SftDataConfig
from trivet.errors import ConfigError


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(SftConfig, argv, environ={})
    return str(caught.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ('--data.subsets ["a","b"] --data.probabilities [0.5]', "data.probabilities has 1 numbers for 2 sources: 1 != 2"),
        ('--data.subsets ["a","b"] --data.splits ["train"]', "data.splits has 1 names for 2 data.subsets: 1 != 2"),
        ('--data.splits ["a","b"] --data.probabilities [1,3]', "must sum to 1, got 1.0 + 3.0 = 4; try [0.25, 0.75]"),
        ('--data.splits ["a","b"] --data.probabilities [0,1]', "data.probabilities must be > 0, got [0.0, 1.0]"),
        ("--data.subsets []", "data.subsets must name at least one"),
        ('--val.data.splits ["a","b"] --val.data.probabilities [1]', "val.data.probabilities has 1 numbers for 2 sources"),
        ("--data.type fake", 'data.type "fake" has no end: set max_steps'),
        ("--data.pack-function pad", "data.pack_function must be one of"),
        ("--data.loss-mask.robot true", "unknown key data.loss_mask.robot"),
    ],
)
def test_what_does_not_fit_together_is_said(argv: str, message: str) -> None:
    assert message in refusal(*argv.split())


def test_what_fits_is_taken() -> None:
    argv = '--data.subsets ["a","b"] --data.probabilities [0.25,0.75] --data.stopping-strategy all_exhausted'
    data = load_config(SftConfig, argv.split(), environ={}).config.data
    assert isinstance(data, SftDataConfig)
    assert data.probabilities == [0.25, 0.75]
    fake = load_config(
        SftConfig, ["--data.type", "fake", "--data.length", "variable", "--max-steps", "3"], environ={}
    ).config.data
    assert isinstance(fake, FakeDataConfig)
    assert fake.length == "variable"


def test_a_name_of_the_hub_is_not_looked_for_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").touch()
    assert not looks_local("PrimeIntellect/Reverse-Text-SFT")
    assert all(looks_local(name) for name in ("data.jsonl", "./data", "/data", "a/b/c", str(tmp_path)))
    sft = SftConfig.model_validate({"data": {"name": "org/set"}, "val": {"data": {"name": str(tmp_path / "val.jsonl")}}})
    assert list(file_problems(sft)) == []
    sft = SftConfig.model_validate({"data": {"name": str(tmp_path / "val.jsonl"), "subsets": ["a"]}, "val": {}})
    assert [problem.partition(" ")[0] for problem in file_problems(sft)] == ["data.subsets", "val.data.name"]
