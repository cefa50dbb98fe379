"""Functions reach other processes by files. Those of `__main__` are tested by scripts, as a user runs them."""

import functools
import json
import os.path
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from datasets import Dataset

from trivet.errors import ConfigError
from trivet.library.functions import FunctionFiles
from trivet.process.imports import import_by_path


def imported(files: FunctionFiles, path: str) -> object:
    files.write()
    return import_by_path(path)


def test_a_function_of_an_installed_module_goes_by_its_name(tmp_path: Path) -> None:
    files = FunctionFiles(tmp_path)
    assert imported(files, files.path_of(os.path.join, argument="loss")) is os.path.join


def test_only_the_user_may_read_the_files_and_none_is_written_before_the_run_starts(tmp_path: Path) -> None:
    files = FunctionFiles(tmp_path / "outputs")
    path = files.path_of(lambda inputs: inputs, argument="loss")
    assert not (tmp_path / "outputs").exists()
    assert imported(files, path)(5) == 5
    folder = Path(path.rpartition(":")[0]).parent
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder, *sorted(folder.glob("loss_*")))] == [0o700, 0o600, 0o600]


def test_closures_methods_and_objects_that_can_be_called_take_their_values_along(tmp_path: Path) -> None:
    class Scale:
        def __init__(self, factor: float) -> None:
            self.factor = factor
            self.data = Dataset.from_list([{"weight": 2.0}])

        def __call__(self, value: float) -> float:
            return value * self.factor * self.data[0]["weight"]

    scale = Scale(1.5)
    files = FunctionFiles(tmp_path)
    paths = [files.path_of(each, argument="loss") for each in (scale, scale.__call__, lambda value: scale(value))]
    files.write()
    assert [import_by_path(path)(2.0) for path in paths] == [6.0, 6.0, 6.0]
    with pytest.raises(ConfigError, match="loss must be a function, got 3"):
        files.path_of(3, argument="loss")


def test_a_module_that_no_other_process_can_import_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("made_in_memory")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("def inner():\n    return 3\n\n\ndef f():\n    return inner()\n", module.__dict__)
    files = FunctionFiles(tmp_path)
    path = files.path_of(module.f, argument="loss")
    monkeypatch.delitem(sys.modules, module.__name__)
    assert imported(files, path)() == 3


def test_a_partial_keeps_its_arguments(tmp_path: Path) -> None:
    def scaled(inputs: float, *, scale: float, power: int) -> float:
        return inputs**power * scale

    files = FunctionFiles(tmp_path)
    paths = [files.path_of(functools.partial(scaled, scale=scale, power=2), argument="loss") for scale in (1.0, 3.0)]
    assert [imported(files, path)(2.0) for path in paths] == [4.0, 12.0]
    assert "/scaled_" in paths[0]


USED_BY_A_SCRIPT = """
import functools
import math as m
import re
from collections import Counter as Tally
from dataclasses import dataclass

from beside_the_script import helper

SCALE = 2.5
WEIGHTS = {"a": [1, (2, 3)]}
TAG = re.compile("<b>(.*?)</b>", re.DOTALL)

@dataclass
class Score:
    value: float

class Better(Score):
    def doubled(self):
        return self.value * SCALE

def twice(function):
    @functools.wraps(function)
    def called(*args):
        return function(function(*args))
    return called

@twice
def root(value, *, power=WEIGHTS["a"][0]):
    return m.sqrt(value) ** power

alias = root

def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)

def wanted(text):
    def inner(n):
        return alias(n)
    return [Better(inner(16)).doubled(), TAG.findall(text), Tally(text)["b"], even(4), helper()]
"""
WRITE_PATH = """
import sys
from pathlib import Path
from trivet.errors import ConfigError
from trivet.library.functions import FunctionFiles
files = FunctionFiles(Path(sys.argv[1]))
try:
    print(files.path_of(wanted, argument="loss"))
    files.write()
except ConfigError as exc:
    print("refused:", exc)
"""


def path_in_script(tmp_path: Path, script: str, *, by_stdin: bool = False) -> str:
    """Return the path of the script's function `wanted`, or the refusal."""
    text = textwrap.dedent(script) + WRITE_PATH
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "beside_the_script.py").write_text("def helper():\n    return 7\n")
    program = "-" if by_stdin else str(tmp_path / "script.py")
    command, given = [sys.executable, program, str(tmp_path / "outputs")], text if by_stdin else None
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    return done.stdout.strip()


@pytest.mark.parametrize("by_stdin", [False, True], ids=["file", "python -"])
def test_a_function_of_a_script_takes_along_what_it_uses(tmp_path: Path, by_stdin: bool) -> None:
    path = path_in_script(tmp_path, USED_BY_A_SCRIPT, by_stdin=by_stdin)
    program = f"""
import json
from trivet.process.imports import import_by_path
print(json.dumps(import_by_path({path!r})('<b>x</b>')))
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [5.0, ["x"], 2, True, 7]


def test_the_path_follows_the_code_and_what_it_uses_and_not_its_line(tmp_path: Path) -> None:
    script = "SCALE = {}\ndef helper(x): return x in {{'a', 'b'}}\ndef wanted(x): return helper(x) * SCALE\n"
    first = path_in_script(tmp_path, script.format(1))
    assert path_in_script(tmp_path, "\n\n" + script.format(1)) == first
    assert path_in_script(tmp_path, script.format(2)) != first
    assert path_in_script(tmp_path, script.format(1).replace("'b'", "'c'")) != first


def test_a_value_that_cannot_be_pickled_is_refused_under_the_name_of_the_argument(tmp_path: Path) -> None:
    refused = path_in_script(tmp_path, "import threading\nlock = threading.Lock()\ndef wanted(): return lock")
    assert refused.startswith("refused: loss uses a value that other processes cannot have: ")
    assert "into a file of its own" in refused
