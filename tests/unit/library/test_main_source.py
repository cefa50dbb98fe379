"""Functions of `__main__` become modules of their own. Each test runs a script, as a user does."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TAIL = """
from trivet.errors import ConfigError
from trivet.library.main_source import source_of
try:
    print(source_of(wanted, argument="loss"))
except ConfigError as exc:
    print("refused:", exc)
"""


def copy(tmp_path: Path, script: str) -> str:
    """The module that is made of `wanted`, or the refusal."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script) + TAIL)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def run_copy(source: str, call: str) -> object:
    namespace: dict[str, object] = {}
    exec(compile(source, "copy", "exec"), namespace)
    return eval(call, namespace)


def test_a_function_takes_along_what_it_uses_and_nothing_else(tmp_path: Path) -> None:
    source = copy(
        tmp_path,
        """
        import functools
        import math as m
        import re
        from collections import Counter as Tally
        from dataclasses import dataclass

        SCALE = 2.5
        WEIGHTS = {"a": [1, (2, 3)]}
        TAG = re.compile("<b>(.*?)</b>", re.DOTALL)
        unused = open(__file__)

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
            unused = 1
            return m.sqrt(value) ** power

        alias = root

        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)

        def wanted(text):
            def inner(n):
                return alias(n)
            return Better(inner(16)).doubled(), TAG.findall(text), Tally(text)["b"], even(4)
        """,
    )
    assert "unused = open" not in source
    assert "trivet" not in source
    assert run_copy(source, "wanted('<b>x</b>')") == (5.0, ["x"], 2, True)


def test_annotations_that_were_never_evaluated_stay_text(tmp_path: Path) -> None:
    source = copy(tmp_path, "from __future__ import annotations\ndef wanted(x: NotThere) -> int: return 3\n")
    assert run_copy(source, "wanted(1)") == 3


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("handle = open(__file__)\ndef wanted(): return handle", "uses handle, a value of type TextIOWrapper"),
        ("import __main__ as me\ndef wanted(): return me", "uses the module __main__ itself"),
        ("exec('def other(): pass')\ndef wanted(): return other()", "uses other, whose source is not known or has changed"),
        ("def old(): pass\nnew = old\ndel old\ndef wanted(): return new()", "uses new, which was defined as old and renamed"),
    ],
)
def test_what_other_processes_cannot_have_is_named(tmp_path: Path, script: str, reason: str) -> None:
    refused = copy(tmp_path, script)
    assert refused.startswith("refused: loss uses")
    assert reason in refused
    assert "into a file of its own" in refused


def test_modules_beside_the_script_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_script.py").write_text("def helper():\n    return 7\n")
    source = copy(tmp_path, "from beside_the_script import helper\ndef wanted(): return helper()\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run_copy(source, "wanted()") == 7
    assert sys.path[-1] == str(tmp_path)
