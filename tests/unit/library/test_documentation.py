"""The page of the library: its examples work, its names are the library's, and importing it is cheap."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import trivet
from support.documents import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
STARTS_A_RUN = "for step in trainer:"


@pytest.mark.parametrize("block", BLOCKS)
def test_every_example_runs_up_to_what_starts_processes(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "outputs/quickstart/sft/weights/step_100"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    compile(block, "docs/python.md", "exec")
    exec(block.partition(STARTS_A_RUN)[0], {"__name__": "example_of_the_page"})


def test_the_first_example_starts_a_run() -> None:
    assert STARTS_A_RUN in BLOCKS[0]
    assert len(BLOCKS) >= 5


def test_the_page_has_every_name_and_no_other() -> None:
    table = PAGE.partition("| name | is |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)\(", table, re.MULTILINE)) == set(trivet.__all__)
    assert {name for name in dir(trivet) if name[0].isalpha()} >= set(trivet.__all__)
    with pytest.raises(AttributeError, match="the library has EvalConfig"):
        _ = trivet.RLTrainr  # type: ignore[attr-defined]


def test_importing_trivet_imports_nothing_and_its_names_no_torch() -> None:
    program = (
        "import sys; before = set(sys.modules); import trivet\n"
        "heavy = {'pydantic', 'torch', 'vllm', 'numpy', 'verifiers', 'IPython'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)), sorted(n for n in sys.modules if n.startswith('trivet')))\n"
        "for name in trivet.__all__: getattr(trivet, name)\n"
        "print(sorted({'torch', 'vllm', 'verifiers', 'transformers', 'IPython'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[] ['trivet']", "[]"]
