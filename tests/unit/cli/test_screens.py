import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from support.big_run import write_run
from support.evaluations import write_evaluation
from trivet.cli.screens import EVALUATIONS, RUN, EvaluationsScreen, RunScreen, TerminalApp

SIZE = (140, 40)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    write_evaluation(tmp_path, step=0, rewards=[[0.0], [1.0], [0.5]])
    write_evaluation(tmp_path, step=5, rewards=[[1.0], [0.25], [0.5]])
    write_evaluation(tmp_path, step=5, env="sums", rewards=[[1.0]])
    return tmp_path


def drive(directory: Path, play: Callable[[Pilot[None]], Awaitable[None]], *, first: str = EVALUATIONS) -> None:
    """Open the app on a made-up terminal and let `play` press keys."""

    async def open_app() -> None:
        async with TerminalApp(directory, first=first).run_test(size=SIZE) as pilot:
            await pilot.pause()
            await play(pilot)

    asyncio.run(open_app())


def driven(play: Callable[[Pilot[None], Path], Awaitable[None]]) -> Callable[[Path], None]:
    """Make a test of a coroutine function that presses keys on the evaluations of `run_directory`."""

    def test(run_directory: Path) -> None:
        drive(run_directory, lambda pilot: play(pilot, run_directory))

    return test


def position(pilot: Pilot[None]) -> str:
    return str(pilot.app.screen.query_one("#position", Static).content)


def conversations(pilot: Pilot[None]) -> list[str]:
    shown = pilot.app.screen.query(".conversation").results(Static)
    return [str(static.content) for static in shown if static.parent.display]


@driven
async def test_the_list_has_every_evaluation_and_enter_opens_its_first_rollout(pilot: Pilot[None], run_directory: Path) -> None:
    table = pilot.app.screen.query_one(DataTable)
    assert " ".join(map(str, table.get_row_at(1))) == "step 5 spelling 0.5833 0.1250 0.7500 1 3 0"
    await pilot.press("down", "enter")
    assert position(pilot) == "rollout 1 of 3 · example 0 attempt 0 · all, in file order"
    [text] = conversations(pilot)
    assert "reward 1" in text
    assert "Spell question 0." in text
    assert "policy 5 answers 1" in text


@driven
async def test_keys_walk_through_the_rollouts_and_stop_at_both_ends(pilot: Pilot[None], run_directory: Path) -> None:
    await pilot.press("enter", "n")
    assert position(pilot).startswith("rollout 2 of 3")
    await pilot.press("n", "n", "n")
    assert position(pilot).startswith("rollout 3 of 3")
    await pilot.press("p", "p", "p")
    assert position(pilot).startswith("rollout 1 of 3")
    await pilot.press("q")
    assert not pilot.app.is_running


@driven
async def test_rollouts_are_sorted_by_reward_and_filtered(pilot: Pilot[None], run_directory: Path) -> None:
    await pilot.press("enter", "s", "s")
    assert "example 1 attempt 0 · all, highest reward first" in position(pilot)
    await pilot.press("f", "f")
    assert position(pilot) == "rollout 1 of 2 · example 2 attempt 0 · not passed, highest reward first"
    await pilot.press("f")
    assert position(pilot).startswith("rollout 1 of 1 · example 2")


def test_a_filter_that_nothing_passes_leaves_an_empty_view(tmp_path: Path):
    write_evaluation(tmp_path, step=1, rewards=[[0.0]])

    async def play(pilot: Pilot[None]) -> None:
        await pilot.press("enter", "f", "n", "p")
        assert position(pilot) == "rollout 0 of 0 · passed, in file order"
        assert conversations(pilot) == ["nothing to show"]

    drive(tmp_path, play)


@driven
async def test_a_search_goes_to_the_next_rollout_with_the_text_and_around_the_end(
    pilot: Pilot[None], run_directory: Path
) -> None:
    await pilot.press("enter", "slash", *"QUESTION2", "enter")
    await pilot.pause()
    assert position(pilot).startswith("rollout 3 of 3")
    await pilot.press("slash", "enter")
    await pilot.pause()
    assert position(pilot).startswith("rollout 3 of 3"), "the only rollout with the text"
    await pilot.press("slash", *"xyz", "escape", "n", "p")
    assert position(pilot).startswith("rollout 2 of 3"), "keys move again after the search line was left"


@driven
async def test_two_policies_are_compared_on_the_same_example(pilot: Pilot[None], run_directory: Path) -> None:
    await pilot.press("c", "down", "enter")
    before, after = conversations(pilot)
    assert "policy 0 answers 0" in before
    assert "policy 5 answers 1" in after
    assert "Spell question 0." in before
    assert "Spell question 0." in after
    await pilot.press("f", "s")
    assert position(pilot) == "rollout 1 of 2 · example 1 attempt 0 · different reward, greatest loss first"


@driven
async def test_evaluations_of_two_environments_are_not_compared(pilot: Pilot[None], run_directory: Path) -> None:
    await pilot.press("c", "down", "down", "enter")
    assert len(pilot.app._notifications) == 1


@driven
async def test_escape_sequences_and_markup_of_a_model_are_shown_and_not_obeyed(pilot: Pilot[None], run_directory: Path) -> None:
    await pilot.press("enter")
    [text] = conversations(pilot)
    assert "\\x1b[2J\\x07[red]" in text
    assert "\x1b" not in text


def test_a_rollout_of_another_form_and_a_very_long_one_are_shown(tmp_path: Path):
    directory = write_evaluation(tmp_path, step=1, rewards=[[1.0], [0.0]])
    path = directory / "results.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    long = second.replace(b"second line", b"x" * 100_000)
    path.write_bytes(b'{"example_id":7,"completion":5}\n' + first.replace(b'"Spell question 0."', b'{"a":[1]}') + long)

    async def play(pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        assert conversations(pilot) == ["This line is no rollout that can be shown."]
        await pilot.press("n")
        assert "{'a': [1]}" in conversations(pilot)[0]
        await pilot.press("n")
        [text] = conversations(pilot)
        assert len(text) < 25_000
        assert " characters)" in text

    drive(tmp_path, play)


@driven
async def test_a_file_that_went_away_is_told_in_the_list(pilot: Pilot[None], run_directory: Path) -> None:
    (run_directory / "evals" / "step_0" / "spelling" / "results.jsonl").unlink()
    await pilot.press("enter")
    assert len(pilot.app._notifications) == 1
    assert position(pilot) == "3 evaluations. Enter shows the rollouts."


def test_keys_switch_between_the_run_and_its_evaluations(tmp_path: Path):
    layout = write_run(tmp_path / "run", num_steps=3, is_running=True)
    write_evaluation(layout.root, step=1, rewards=[[1.0]])

    async def play(pilot: Pilot[None]) -> None:
        shown = pilot.app.screen.query_one("#picture", Static)
        assert "has waited" in "".join(
            segment.text for line in pilot.app.screen._compositor.render_strips() for segment in line
        )
        await pilot.press("e", "enter")
        assert position(pilot).startswith("rollout 1 of 1")
        await pilot.press("r")
        assert pilot.app.screen.query_one("#picture", Static) is shown
        await pilot.press("e")
        assert position(pilot).startswith("rollout 1 of 1"), "the screen is as it was left"

    drive(layout.root, play, first=RUN)


def test_a_directory_without_the_other_screens_files_says_so(run_directory: Path):
    async def play(pilot: Pilot[None]) -> None:
        await pilot.press("r")
        assert isinstance(pilot.app.screen, EvaluationsScreen)
        assert len(pilot.app._notifications) == 1

    drive(run_directory / "evals", play)


@driven
async def test_letters_of_a_search_do_not_switch_the_screen(pilot: Pilot[None], run_directory: Path) -> None:
    await pilot.press("enter", "slash", *"req")
    assert pilot.app.is_running
    assert not isinstance(pilot.app.screen, RunScreen)
