"""Import paths of functions. Those of `__main__` are tested by scripts, as a user runs them."""

import functools
import importlib
import json
import os.path
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trivet.errors import ConfigError
from trivet.library.functions import FunctionFiles, split_partial
from trivet.process.imports import import_by_path


def write_module(folder: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> object:
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, name, module)  # removed at the end of the test
    return module


def test_a_function_of_an_installed_module_goes_by_its_name(tmp_path: Path) -> None:
    path = FunctionFiles(tmp_path).path_of(os.path.join, argument="loss")
    assert import_by_path(path) is os.path.join
    assert ".py" not in path


def test_a_function_of_a_users_file_goes_by_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = write_module(tmp_path, "file_of_a_user", "def f():\n    return 3\n", monkeypatch)
    path = FunctionFiles(tmp_path).path_of(module.f, argument="loss")
    assert path == f"{tmp_path}/file_of_a_user.py:f"
    assert import_by_path(path)() == 3


@pytest.mark.parametrize(
    "function",
    [lambda inputs: inputs, print, functools.partial(print), test_a_function_of_a_users_file_goes_by_that_file.__str__],
)
def test_what_has_no_name_of_its_own_is_refused(tmp_path: Path, function: object) -> None:
    with pytest.raises(ConfigError, match="advantage must be a function that is defined with def"):
        FunctionFiles(tmp_path).path_of(function, argument="advantage")


def test_a_function_that_its_module_has_no_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = write_module(tmp_path, "changed_meanwhile", "def f():\n    return 3\n", monkeypatch)
    old, module.f = module.f, print
    with pytest.raises(ConfigError, match="loss: module changed_meanwhile has no function f"):
        FunctionFiles(tmp_path).path_of(old, argument="loss")


def test_rewards_replace_the_rubric_of_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def half(completion, **kwargs):\n    return 0.5\n\n\ndef one(completion, **kwargs):\n    return 1.0\n"
    module = write_module(tmp_path, "rewards_of_a_user", source, monkeypatch)
    files = FunctionFiles(tmp_path / "outputs")
    rewards = [files.path_of(function, argument="rewards") for function in (module.half, module.one)]
    path = files.with_rewards("reverse-text", rewards, weights=[1.0, 0.25])
    assert not (tmp_path / "outputs").exists()  # nothing is written before the run is started
    files.write()
    file = Path(path.rpartition(":")[0])
    assert [stat.S_IMODE(each.stat().st_mode) for each in (file.parent, file)] == [0o700, 0o600]
    env = import_by_path(path)(num_examples=4)
    assert ([each.__name__ for each in env.rubric.funcs], env.rubric.weights) == (["half", "one"], [1.0, 0.25])
    files = FunctionFiles(tmp_path / "outputs")
    again = files.with_rewards(f"{file}:load_environment", rewards[:1], weights=[1.0])
    assert again != path
    files.write()
    env = import_by_path(again)(num_examples=4)
    assert [each.__name__ for each in env.rubric.funcs] == ["half"]


def test_a_partial_is_a_function_and_its_keywords() -> None:
    def f(inputs: object, *, scale: float, power: int) -> None: ...

    assert split_partial(functools.partial(functools.partial(f, scale=1.0, power=2), scale=3.0)) == (
        f,
        {"scale": 3.0, "power": 2},
    )
    with pytest.raises(ConfigError, match="fixes arguments by position"):
        split_partial(functools.partial(f, 1))


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
