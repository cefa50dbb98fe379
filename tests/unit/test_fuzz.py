"""No generated input ends a command in a traceback or hangs it. `scripts/fuzz_inputs.py` tries thousands more."""

from pathlib import Path

import pytest

from support.fuzz import Fuzzer

CASES = {"toml": 60, "flags": 60, "variables": 40, "data": 60, "events": 20, "metrics": 20, "paths": 60}


@pytest.mark.parametrize("kind", CASES)
def test_generated_input_ends_in_a_known_exit_code(kind: str, tmp_path: Path) -> None:
    fuzzer = Fuzzer(tmp_path, seed=20_261)
    fuzzer.run(kind, cases=CASES[kind])
    assert fuzzer.tried[kind].cases >= CASES[kind] // 2
