"""Contains the terminal program of `trivet top` and `trivet evals`: a screen for the run, and one for its evaluations.

Only these tools import it, and only on a terminal. Text from files is shown through `printable`, never as markup.
"""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from trivet.cli.run_tools import EVALUATION_COLUMNS, draw_run, evaluation_cells
from trivet.errors import ConfigError
from trivet.shown_text import one_line, printable
from trivet.telemetry.console import message_text
from trivet.view.evaluations import (
    FILTERS,
    PAIR_FILTERS,
    PAIR_SORTS,
    SORTS,
    FoundEvaluation,
    RolloutPair,
    find_evaluations,
    pair_rollouts,
)
from trivet.view.rollouts import RolloutFile
from trivet.view.run import ViewedRun, open_run
from trivet.wire.rollouts import RolloutRecord

RUN, EVALUATIONS = "run", "evaluations"
_REFRESH_INTERVAL_S = 1.0
_MAX_MESSAGE_CHARS = 20_000
"""Characters of a message that are shown. To wrap a message of a megabyte would block the keys for seconds."""
_MAX_MESSAGES = 400
_STYLES = {"system": "bold magenta", "user": "bold green", "assistant": "bold cyan", "tool": "bold yellow"}


class TerminalApp(App[None]):
    """Shows a run and its evaluations in the terminal."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    DataTable { height: auto; max-height: 40%; }
    #position { height: auto; background: $panel; padding: 0 1; }
    .column { width: 1fr; padding: 0 1; border-top: solid $primary; }
    #search { display: none; }
    #search.asked { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", f"show('{RUN}')", "Run"),
        Binding("e", f"show('{EVALUATIONS}')", "Evaluations"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
    ]

    def __init__(self, directory: Path, *, first: str) -> None:
        """Show nothing yet.

        Args:
            directory: a run's output_dir. For the screen of evaluations it may be any directory of evaluations.
            first: the first screen, `RUN` or `EVALUATIONS`.
        """
        super().__init__()
        self._directory = directory
        self._first = first

    def show(self) -> int:
        """Run the program until a key or a signal ends it. Return the exit code."""
        self.run()
        return self.return_code or 0

    def on_mount(self) -> None:
        """Show the first screen, and handle signals like the key `q`, so that the terminal is restored."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, lambda code=128 + number: self.exit(return_code=code))
        self.action_show(self._first)

    def action_show(self, name: str) -> None:
        """Switch to the screen `name`. If the directory does not contain what the screen shows, show a warning."""
        if not self.is_screen_installed(name):
            try:
                screen = RunScreen(self._directory) if name == RUN else EvaluationsScreen(self._directory)
            except ConfigError as exc:
                self.notify(str(exc), severity="warning", markup=False)
                return
            self.install_screen(screen, name)
        # The lowest screen of the stack is textual's own and stays.
        show = self.switch_screen if len(self.screen_stack) > 1 else self.push_screen
        show(name)


class RunScreen(Screen[None]):
    """Shows the picture of `trivet top`, renewed every second."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._viewed = ViewedRun(open_run(directory), name=directory.name)

    def compose(self) -> ComposeResult:
        """Lay out the picture above the keys."""
        with VerticalScroll():
            yield Static(id="picture")
        yield Footer()

    def on_mount(self) -> None:
        """Start to renew the picture."""
        self.set_interval(_REFRESH_INTERVAL_S, self.on_resize)

    def on_resize(self) -> None:
        """Draw the picture as wide as the terminal."""
        self.query_one("#picture", Static).update(draw_run(self._viewed, width=max(40, self.size.width - 2)))


class EvaluationsScreen(Screen[None]):
    """Shows the list of evaluations, and below it one rollout, or two of the same example side by side."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "move(1)", "Next"),
        Binding("p", "move(-1)", "Previous"),
        Binding("pageup", "scroll_pages(-1)", "Page up", show=False, priority=True),
        Binding("pagedown", "scroll_pages(1)", "Page down", show=False, priority=True),
        Binding("slash", "search", "Search", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("f", "filter", "Filter"),
        Binding("c", "compare", "Compare"),
        Binding("escape", "close_search", show=False),
    ]

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._evaluations = find_evaluations(directory)
        self._marked: FoundEvaluation | None = None
        """The evaluation that the next opened one is compared with."""
        self._files = ExitStack()
        self._rollouts: Sequence[RolloutFile] = ()
        """The files of the opened evaluations."""
        self._pairs: Sequence[RolloutPair] = ()
        self._shown: Sequence[RolloutPair] = ()
        """The pairs that pass the filter, in order."""
        self._sort = self._filter = self._position = 0
        """Indexes of the chosen order, of the chosen filter, and of the shown pair."""

    def compose(self) -> ComposeResult:
        """Lay out the list, the position, two columns, the search line and the keys."""
        yield DataTable(cursor_type="row")
        yield Static(f"{len(self._evaluations)} evaluations. Enter shows the rollouts.", id="position")
        with Horizontal():
            for _ in range(2):
                with VerticalScroll(classes="column", can_focus=False):
                    yield Static(classes="conversation")
        yield Input(id="search", placeholder="text to look for; Enter goes to the next rollout with it")
        yield Footer()

    def on_mount(self) -> None:
        """Fill the list."""
        table = self.query_one(DataTable)
        table.add_columns(*EVALUATION_COLUMNS)
        for evaluation in self._evaluations:
            table.add_row(*map(Text, evaluation_cells(evaluation)))
        table.focus()

    def on_unmount(self) -> None:
        """Close the files."""
        self._files.close()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the evaluation, next to the marked one if there is one."""
        chosen, marked = self._evaluations[event.cursor_row], self._marked
        self._marked = None
        if marked is not None and marked.name != chosen.name:
            self._warn(f"{_title(marked)} and {_title(chosen)} have different examples: choose one environment")
            return
        try:
            self._open([chosen] if marked in (None, chosen) else [marked, chosen])
        except ConfigError as exc:
            self._warn(str(exc))

    def action_compare(self) -> None:
        """Mark the evaluation under the cursor for a comparison."""
        self._marked = marked = self._evaluations[self.query_one(DataTable).cursor_row]
        text = f"Choose what to compare with {_title(marked)}: Enter. The same evaluation again: no comparison."
        self.query_one("#position", Static).update(Text(text))

    def action_move(self, by: int) -> None:
        """Go to another rollout."""
        self._go(self._position + by)

    def action_scroll_pages(self, pages: int) -> None:
        """Scroll every conversation by its height."""
        for column in self.query(".column").results(VerticalScroll):
            column.scroll_relative(y=pages * max(1, column.size.height - 1), animate=False)

    def action_sort(self) -> None:
        """Switch to the next order, and go to the first rollout."""
        self._sort += 1
        self._select()

    def action_filter(self) -> None:
        """Switch to the next filter, and go to the first rollout."""
        self._filter += 1
        self._select()

    def action_search(self) -> None:
        """Open the search line."""
        self.query_one("#search", Input).add_class("asked").focus()

    def action_close_search(self) -> None:
        """Close the search line."""
        self.query_one("#search", Input).remove_class("asked")
        self.query_one(DataTable).focus()

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go to the next rollout that contains the text. After the last rollout the search goes on with the first."""
        self.action_close_search()
        order = [*range(self._position + 1, len(self._shown)), *range(min(self._position + 1, len(self._shown)))]

        def find() -> int | None:
            pairs = ((position, zip(self._rollouts, self._shown[position], strict=True)) for position in order)
            return next(
                (position for position, pair in pairs if any(file.contains(head, event.value) for file, head in pair)), None
            )

        # On a thread, because reading all conversations may take seconds.
        position = await asyncio.to_thread(find) if event.value else self._position
        if position is None:
            self._warn(f"no rollout contains {one_line(event.value)!r}")
        else:
            self._go(position)

    def _open(self, evaluations: Sequence[FoundEvaluation]) -> None:
        """Show the rollouts of one evaluation, or of two side by side."""
        with ExitStack() as files:
            rollouts = [RolloutFile(evaluation.results) for evaluation in evaluations]
            for opened in rollouts:
                files.callback(opened.close)
            self._files.close()
            self._files = files.pop_all()
        self._rollouts, self._pairs = rollouts, pair_rollouts(rollouts)
        for index, column in enumerate(self.query(".column").results(VerticalScroll)):
            column.display = index < len(evaluations)
            column.border_title = Text(_title(evaluations[index])) if column.display else None
        self._sort = self._filter = 0
        self._select()

    def _select(self) -> None:
        """Apply the chosen filter and order, and go to the first rollout."""
        is_passing, key = self._choice(FILTERS, PAIR_FILTERS, self._filter)[1], self._choice(SORTS, PAIR_SORTS, self._sort)[1]
        self._shown = sorted(filter(is_passing, self._pairs), key=key)
        self._go(0)

    def _choice(self, single: Mapping[str, Any], paired: Mapping[str, Any], index: int) -> tuple[str, Any]:
        """Return the name and the function of a filter or an order, from the table for one evaluation or for two."""
        choices = list((paired if len(self._rollouts) > 1 else single).items())
        return choices[index % len(choices)]

    def _go(self, position: int) -> None:
        """Show the rollout or the pair at `position`, limited to the existing ones."""
        if not self._rollouts:
            return
        self._position = max(0, min(position, len(self._shown) - 1))
        pair: RolloutPair = self._shown[self._position] if self._shown else ()
        records = [file.row(head) for file, head in zip(self._rollouts, pair, strict=False)]
        order = f"{self._choice(FILTERS, PAIR_FILTERS, self._filter)[0]}, {self._choice(SORTS, PAIR_SORTS, self._sort)[0]}"
        texts = [f"rollout {self._position + 1 if pair else 0} of {len(self._shown)}", order]
        if pair:
            texts.insert(1, f"example {pair[0].example_id} attempt {pair[0].attempt}")
        if num_damaged := sum(rollouts.num_damaged for rollouts in self._rollouts):
            texts.append(f"{num_damaged} damaged lines skipped")
        if len({str(record.prompt) for record in records if record is not None}) > 1:
            texts.append("the prompts differ")
        self.query_one("#position", Static).update(Text(" · ".join(texts)))
        for index, column in enumerate(self.query(".column").results(VerticalScroll)):
            text = _conversation(records[index]) if index < len(records) else Text("nothing to show", style="dim")
            column.query_one(Static).update(text)
            column.scroll_home(animate=False)

    def _warn(self, text: str) -> None:
        self.notify(text, severity="warning", markup=False)


def _conversation(record: RolloutRecord | None) -> Text:
    """Return the scores and messages of a rollout as text to show. None stands for a damaged line."""
    if record is None:
        return Text("This line is no rollout that can be shown.", style="red")
    scores = "".join(f"  {one_line(name)} {value:g}" for name, value in record.scores.items())
    turns = f"  turns {record.num_turns}" if record.num_turns else ""
    cut = "  truncated" if record.is_truncated else ""
    text = Text.assemble((f"reward {record.reward:g}", "bold"), f"{scores}{turns}{cut}\n")
    messages = [*record.prompt, *record.completion]
    for message in messages[:_MAX_MESSAGES]:
        role = one_line(str(message.get("role", "")))
        text.append(f"\n{role}\n", style=_STYLES.get(role, "bold"))
        try:
            content = message_text(message)
        except (AttributeError, KeyError, TypeError):  # a message of another form is shown as it is
            content = str(message)
        if len(content) > _MAX_MESSAGE_CHARS:
            content = f"{content[:_MAX_MESSAGE_CHARS]}… ({len(content)} characters)"
        text.append(printable(content.replace("\r\n", "\n").expandtabs(4)) + "\n")
    if len(messages) > _MAX_MESSAGES:
        text.append(f"\n… {len(messages) - _MAX_MESSAGES} more messages", style="dim")
    return text


def _title(evaluation: FoundEvaluation) -> str:
    return one_line(f"{evaluation.name}, {evaluation.policy}")
