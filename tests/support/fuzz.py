"""Generates input for the commands and checks each outcome: a known exit code, in time, without a traceback.

`tests/unit/test_fuzz.py` tries some hundred cases, `scripts/fuzz_inputs.py` thousands. A seed and a number of cases say which.
"""

import io
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import hypothesis
import msgspec
from hypothesis import strategies as st

from support.big_run import write_run
from support.histories import RunMaker
from trivet.cli.main import main as run_tool
from trivet.config.command import run_command
from trivet.config.keys import all_keys, dotted
from trivet.config.layout import RunLayout
from trivet.config.load import COMMANDS
from trivet.config.schema.base import Section
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.conversations.records import read_conversation
from trivet.conversations.sources import open_source
from trivet.errors import ConfigError
from trivet.view.api import Api
from trivet.view.run import ViewedRun

KINDS = (RLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig, EvalConfig)
_HANG_S = 20
"""Seconds after which a case is interrupted."""
_KEYS = {kind: [dotted(path) for path, _ in all_keys(kind)] for kind in COMMANDS}

_PLAIN = ["", "None", "true", "inf", "-inf", "nan", "1e400", "0x10", "-1", "٣", "step_٣", "@", "--", "~", "..", "/", "http://"]
_HOSTILE = ["~nouser-here/x", "a\0b", "\x1b[2J", "\ud800", "[" * 3000, "{" * 3000, '{"a":' * 200 + "1" + "}" * 200]
odd_texts = st.one_of(
    st.sampled_from([*_PLAIN, *_HOSTILE, "9" * 5000, "x" * 5000]),
    st.text(max_size=30),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
plausible_texts = st.sampled_from(["1", "2", "8", "0.5", "1e-6", "true", "false", "None", "auto", "a,b", "[1, 2]", "/tmp"])
flag_values = st.one_of(plausible_texts, plausible_texts, odd_texts, json_values.map(json.dumps))
_ENDS = st.sampled_from([("[", "]"), ('{"a":', "}")])
nests = st.builds(lambda depth, ends: (ends[0] * depth, ends[1] * depth), st.integers(1, 3000), _ENDS)
"""Values that are nested deeply, and what closes them."""

_NEEDED: dict[type[Section], list[str]] = {
    RLConfig: ["--orchestrator.rollouts-per-example", "2"],
    OrchestratorConfig: ["--rollouts-per-example", "2"],
}
"""Flags that every valid command needs."""


def key_of(kind: type[Section]) -> st.SearchStrategy[str]:
    """Draw a key of `kind`, or one that only looks like it."""
    known = st.sampled_from(_KEYS[kind])
    alike = st.one_of(known.map(lambda key: key[:-1]), known.map(lambda key: f"{key}.0.x"), odd_texts)
    return st.one_of(known, known, known, known, known, alike)


def toml_value(value: object) -> str:
    """Write `value` as TOML on one line. TOML does not promise all of these integers and texts."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))} = {toml_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, float):
        return str(value)
    return '"None"' if value is None else json.dumps(value)


toml_values = st.one_of(
    plausible_texts.map(lambda text: text if text[0] in "[0123456789tf" else json.dumps(text)),
    plausible_texts.map(json.dumps),
    json_values.map(toml_value),
    odd_texts,
    odd_texts.map(json.dumps),
)


@st.composite
def toml_texts(draw: st.DrawFn, kind: type[Section]) -> str:
    lines = [f"{draw(key_of(kind))} = {draw(toml_values)}" for _ in range(draw(st.integers(0, 5)))]
    if draw(st.integers(0, 4)) == 0:
        lines.append(f"[{draw(key_of(kind))}]\nx = 1")
    if draw(st.integers(0, 9)) == 0:
        lines.append(f"x = {''.join(draw(nests))}")
    return "\n".join(lines)


@dataclass(kw_only=True)
class Tried:
    """The result of one kind of input."""

    cases: int = 0
    worst_s: float = 0.0
    exit_codes: dict[str, int] = field(default_factory=dict)


class Fuzzer:
    """
    >>> fuzzer = Fuzzer(directory, seed=1)
    >>> fuzzer.run("flags", cases=100)
    """

    def __init__(self, directory: Path, *, seed: int) -> None:
        """
        Args:
            directory: empty; the commands' files go there.
        """
        self._directory = directory
        self._seed = seed
        self._run = write_run(directory / "run", num_steps=5).root
        self.tried = {name: Tried() for name in self.kinds()}

    def kinds(self) -> dict[str, Callable[[st.DataObject], None]]:
        return {
            "toml": self._try_toml,
            "flags": self._try_flags,
            "variables": self._try_variables,
            "data": self._try_data,
            "events": self._try_events,
            "metrics": self._try_metrics,
            "paths": self._try_path,
        }

    def run(self, name: str, *, cases: int) -> None:
        """Try `cases` inputs of one kind. Fail with the smallest input that a command cannot handle."""
        attempt = self.kinds()[name]
        tried = self.tried[name]

        def case(data: st.DataObject) -> None:
            started = time.perf_counter()
            with breaking_off():
                attempt(data)
            tried.cases += 1
            tried.worst_s = max(tried.worst_s, time.perf_counter() - started)

        limits = hypothesis.settings(
            max_examples=cases, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        hypothesis.seed(self._seed)(limits(hypothesis.given(st.data())(case)))()

    def _try_toml(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(KINDS))
        text = data.draw(st.one_of(toml_texts(kind), odd_texts))
        file = self._directory / "fuzz.toml"
        file.write_bytes(text.encode(errors="surrogatepass"))
        self._run_kind("toml", kind, ["@", str(file)])

    def _try_flags(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(KINDS))
        words: list[str] = []
        for _ in range(data.draw(st.integers(1, 3))):
            key = data.draw(key_of(kind)).replace("_", "-")
            words += [f"--{key}", data.draw(flag_values)]
        self._run_kind("flags", kind, [word for word in words if word not in ("--help", "-h")])

    def _try_variables(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(KINDS))
        given: dict[str, str] = {}
        for _ in range(data.draw(st.integers(1, 5))):
            name = data.draw(key_of(kind)).replace(".", "__").upper().replace("\0", "").replace("=", "")
            value = data.draw(flag_values).replace("\0", "")
            given[f"TRIVET_{name}"] = value
        before = dict(os.environ)
        try:
            for name, value in given.items():
                with suppress(UnicodeEncodeError):  # the kernel has no such variable either
                    os.environ[name] = value
            self._run_kind("variables", kind, [])
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _try_data(self, data: st.DataObject) -> None:
        values = st.one_of(
            json_values, st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "x"]), "content": json_values}))
        )
        columns = st.sampled_from(["messages", "prompt", "completion", "tools", "x"])
        rows = st.dictionaries(columns, values, max_size=4).map(json.dumps)
        good = st.just('{"messages": [{"role": "user", "content": "a"}]}')
        lines = data.draw(st.lists(st.one_of(good, good, good, rows, odd_texts, nests.map("".join)), max_size=3))
        file = self._directory / data.draw(st.sampled_from(["rows.jsonl", "rows.json"]))
        joined = "\n".join(lines) if file.suffix == ".jsonl" else f"[{','.join(lines)}]"
        file.write_bytes(joined.encode(errors="surrogatepass"))

        def read() -> int:
            try:
                for record in open_source(str(file)):
                    read_conversation(record)
            except ConfigError as exc:
                str(exc).encode(errors="backslashreplace")
                return 2
            return 0

        self._count("data", read)

    def _try_events(self, data: st.DataObject) -> None:
        made = RunMaker(Random(data.draw(st.integers(0, 50))), max_steps=3).run()
        lines = [msgspec.json.encode(event) for event in made]
        path = RunLayout(self._run).events
        path.write_bytes(b"\n".join(self._mutate(data, lines)) + b"\n")
        self._run_tool("events", ["check", str(self._run)])
        self._ask("events", "timeline", {})

    def _try_metrics(self, data: st.DataObject) -> None:
        role = data.draw(st.sampled_from(["trainer", "orchestrator"]))
        made = [json.dumps({"step": step, "time": step, "loss/mean": 0.5, "time/step": 1.0}).encode() for step in range(1, 6)]
        path = RunLayout(self._run).metrics / f"{role}.jsonl"
        path.write_bytes(b"\n".join(self._mutate(data, made)) + b"\n")
        self._ask("metrics", "series", {"names": f"{role}:loss/mean"})
        self._ask("metrics", "metrics", {})
        self._ask("metrics", "timeline", {})
        self._run_tool("metrics", ["top", "--once", str(self._run)])

    def _mutate(self, data: st.DataObject, lines: list[bytes]) -> list[bytes]:
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(lines) - 1))
            line = lines[at]
            how = data.draw(st.integers(0, 5))
            if how == 0:
                lines[at] = data.draw(st.one_of(odd_texts, json_values.map(json.dumps))).encode(errors="surrogatepass")
            elif how == 1:
                lines[at] = line[: data.draw(st.integers(0, len(line)))]
            elif how == 2:
                lines.insert(at, line)
            elif how == 3:
                lines[at] = line.rstrip(b"}") + f', "x": {"1".join(data.draw(nests))}}}'.encode()
            elif how == 4:
                number = data.draw(st.sampled_from([b"9" * 5000, b"-1", b"1e308", b"null", b'"x"', b"1e999"]))
                lines[at] = line.replace(b":1", b":" + number, 1).replace(b": 1", b": " + number, 1)
            else:
                lines[at] = line + data.draw(st.binary(max_size=4))
        return lines

    def _try_path(self, data: st.DataObject) -> None:
        path = data.draw(odd_texts.filter(lambda text: not text.startswith("-")))
        tool = data.draw(st.sampled_from(["status", "check", "top", "@", "output-dir", "model", "replay", "data", "weights"]))
        flags: dict[str, tuple[type[Section], list[str]]] = {
            "@": (TrainerConfig, ["@", path]),
            "output-dir": (TrainerConfig, [f"--output-dir={path}"]),
            "model": (TrainerConfig, [f"--model.name={path}", "--model.lora.rank=8"]),
            "replay": (TrainerConfig, [f"--data.replay={path}"]),
            "data": (COMMANDS[4], [f"--data.name={path}"]),
            "weights": (EvalConfig, [f"--weights-dir={path}"]),
        }
        if tool in flags:
            self._run_kind("paths", *flags[tool])
        else:
            self._run_tool("paths", [tool, path])

    def _run_kind(self, name: str, kind: type[Section], words: list[str]) -> None:
        self._count(name, lambda: run_command(kind, lambda _: 0, [*_NEEDED.get(kind, []), *words, "--dry-run"]))

    def _run_tool(self, name: str, words: list[str]) -> None:
        self._count(name, lambda: run_tool(words))

    def _ask(self, name: str, route: str, query: dict[str, str]) -> None:
        api = Api([ViewedRun(RunLayout(self._run), name="run")])
        self._count(name, lambda: 0 if api.answer(f"/api/{route}", query, client_tag="").body else 1)

    def _count(self, name: str, command: Callable[[], int]) -> None:
        with redirect_stdout(utf8()) as out, redirect_stderr(utf8()) as err:
            try:
                code = command()
            except SystemExit as exc:  # argparse
                code = exc.code if isinstance(exc.code, int) else -1
        said = written(err)
        assert code in (0, 1, 2), code
        assert "Traceback" not in said
        assert "\x1b" not in said + (written(out) if name != "metrics" else "")  # rich draws
        assert code != 2 or said.startswith(("error: ", "usage: ")) or not said, said
        codes = self.tried[name].exit_codes
        codes[str(code)] = codes.get(str(code), 0) + 1


def utf8() -> io.TextIOWrapper:
    """Accepts a command's output, and refuses text that no output can encode."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def written(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode()


@contextmanager
def breaking_off() -> Iterator[None]:
    """Fail a case that hangs."""

    def stop(number: int, _: object) -> None:
        raise AssertionError(f"no end after {_HANG_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def peak_rss_mib() -> float:
    """Return the most memory that this process ever used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
