"""Runs the command `vf-rl`: a run in the dialect of verifiers' trainer, with that trainer's console lines and checkpoints.

The run itself is the command `rl`, started as a child process. This command translates the lines that the child prints, and writes
`checkpoint-N/` into the run's directory (`vf_output`). In tmux it shows the inference server's log above the lines (`vf_tmux`).
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trivet.config.command import run_translated
from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.load import LoadedConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.dialects.vf_output import VfCheckpoints, VfConsole
from trivet.dialects.vf_tmux import DEFAULT_SESSION, require_tmux, run_in_tmux
from trivet.dialects.vf_translation import RUN_NAMES, load_run
from trivet.errors import ConfigError
from trivet.key_names import names_to_variable, use_names
from trivet.launcher.commands import rl
from trivet.launcher.logs import LogFollower
from trivet.process.closed_output import run_until_output_closes
from trivet.process.lifetime import module_command, tied_command
from trivet.process.signals import Interrupts
from trivet.shown_text import print_error
from trivet.storage.durable import write_private

_POLL_INTERVAL_S = 0.5
"""Time between two reads of the run's output and policies, seconds: a step takes longer."""
_USAGE = f"""usage: vf-rl @ FILE.toml [-s SESSION] [--no-tmux] [--key VALUE …]

-s, --session NAME   the tmux session; default {DEFAULT_SESSION}
--no-tmux            in this terminal, without tmux
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        session, rest = take_options(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as exc:
        print_error(exc)
        return exc.exit_code
    is_dry_run = "--dry-run" in rest
    dialect: list[VfRLConfig] = []

    def translate(loaded: LoadedConfig[VfRLConfig]) -> LoadedConfig[RLConfig]:
        dialect.append(loaded.config)
        return load_run(loaded, environ=os.environ)

    def start(config: RLConfig) -> int:
        if session is not None:
            command = module_command("trivet.dialects.vf_rl", *rest, "--no-tmux")
            return run_in_tmux(command, session=session, layout=RunLayout(config.output_dir))
        return _run(config, dialect[0])

    def check(config: RLConfig) -> None:
        if session is not None and not is_dry_run:
            require_tmux(session)
        if session is not None or is_dry_run:  # otherwise the child process checks it
            rl.check(config)
            rl.check_for_dry_run(config)

    def run() -> int:
        if {"--help", "-h"} & set(rest):
            print(_USAGE)  # noqa: T201
        with use_names(RUN_NAMES):
            return run_translated(VfRLConfig, start, rest, translate=translate, check=check)

    return run_until_output_closes(run)


def take_options(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split the words of the command line.

    Returns the name of the tmux session, None to run in this terminal, and the words for the configuration.
    """
    session: str | None = DEFAULT_SESSION
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word in ("-s", "--session"):
            session = next(remaining, "")
            if not session or set(session) & set(".:"):
                raise ConfigError(f"{word} needs the name of a session, without '.' and ':', got {session!r}")
        elif word != "--no-tmux":
            rest.append(word)
    return None if "--no-tmux" in words else session, rest


def _run(config: RLConfig, dialect: VfRLConfig) -> int:
    """Run `config` in this terminal until its end. Return the exit code of the training."""
    layout, args = RunLayout(config.output_dir), dialect.trainer.args
    assert config.max_steps is not None, "the dialect always has max_steps"
    console = VfConsole(
        layout=layout,
        model=dialect.model,
        env=dialect.env.id,
        max_steps=config.max_steps,
        line_interval=args.logging_steps,
        since=time.time(),
    )
    interval = args.save_steps if args.save_strategy == "steps" else None
    checkpoints = VfCheckpoints(layout, interval=interval, max_steps=config.max_steps, replaces_run=config.clean)
    with tempfile.TemporaryDirectory(prefix="trivet-vf-") as scratch:
        file, output = Path(scratch) / "run.toml", Path(scratch) / "launcher.stdout"
        write_private(file, to_toml(config))
        follower = LogFollower(output, offset=0)

        def show_new_output() -> None:
            for line in follower.read_lines():
                for translated in console.translate(line):
                    show(translated)
            for line in console.step_lines():
                show(line)
            for path in checkpoints.write_due():
                show(f"Saved {path}")

        with Interrupts(clock=time.monotonic) as interrupts, output.open("wb") as stdout:
            launcher = subprocess.Popen(  # the kernel ends it if this process is killed
                tied_command(module_command("trivet.launcher.commands.rl", "@", str(file))),
                env=os.environ | names_to_variable(RUN_NAMES),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            forwarded = 0
            while launcher.poll() is None:
                show_new_output()
                forwarded = interrupts.forward(launcher.send_signal, forwarded)
                time.sleep(_POLL_INTERVAL_S)
        show_new_output()
    code = launcher.returncode
    return code if code >= 0 else 128 - code


def show(line: str) -> None:
    """Print a line unless it is a notice: notices were printed before the run was started."""
    if not line.startswith("notice: "):
        with suppress(OSError):  # the terminal or the pipe was closed; the run goes on
            print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    raise SystemExit(main())
