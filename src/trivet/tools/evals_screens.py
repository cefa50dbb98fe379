"""The screens of `trivet evals`: the list of evaluations, and the rollouts of one or of two side by side.

Imported by `trivet.tools.evals` alone, and only on a terminal. Every text of a file is shown through `printable`, never as markup.
"""

import asyncio
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, HelpPanel, Input, Static

from trivet.errors import ConfigError
from trivet.shown_text import one_line, printable
from trivet.telemetry.console import message_text
from trivet.tools.evals import COLUMNS, cells_of
from trivet.view.evaluation_files import (
    FILTERS,
    PAIR_FILTERS,
    PAIR_SORTS,
    SORTS,
    EvaluationRollouts,
    FoundEvaluation,
    RolloutPair,
    pair_rollouts,
)
from trivet.view.rollouts import RolloutRow

_MAX_MESSAGE_CHARS = 20_000
"""Characters of one message that are shown. Breaking lines of a megabyte would stop the keys for seconds."""
_MAX_MESSAGES = 400
_TAB_COLUMNS = 4
_STYLES = {"system": "bold magenta", "user": "bold green", "assistant": "bold cyan", "tool": "bold yellow"}


class EvaluationsApp(App[None]):
    """Browses evaluations.

    >>> app = EvaluationsApp(find_evaluations(directory))
    >>> app.run()
    >>> app.return_code
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #position { height: auto; background: $panel; padding: 0 1; }
    .column { width: 1fr; padding: 0 1; border-top: solid $primary; }
    #search { display: none; }
    #search.asked { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
        Binding("question_mark", "help", "Help", key_display="?"),
    ]

    def __init__(self, evaluations: Sequence[FoundEvaluation]) -> None:
        super().__init__()
        self.evaluations = list(evaluations)

    def on_mount(self) -> None:
        """Show the list. A signal ends the app by its own way out, so that the terminal is restored."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, lambda code=128 + number: self.exit(return_code=code))
        self.push_screen(EvaluationList(self.evaluations))

    def action_help(self) -> None:
        """Show or hide the keys."""
        if self.screen.query(HelpPanel):
            self.action_hide_help_panel()
        else:
            self.action_show_help_panel()


class EvaluationList(Screen[None]):
    """Lists the evaluations with their scores."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "compare", "Compare"),
        Binding("s", "sort", "Sort"),
        Binding("q,escape", "app.quit", "Quit"),
    ]

    def __init__(self, evaluations: Sequence[FoundEvaluation]) -> None:
        super().__init__()
        self._evaluations = list(evaluations)
        self._first: FoundEvaluation | None = None
        """The evaluation that the next one is compared with."""
        self._is_by_reward = False

    def compose(self) -> ComposeResult:
        """Lay out the table above the keys."""
        yield Static(id="position")
        yield DataTable(cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        """Fill the table."""
        self.query_one(DataTable).add_columns(*COLUMNS)
        self._fill()

    def compare_with(self, evaluation: FoundEvaluation | None) -> None:
        """Have the next chosen evaluation shown next to this one."""
        self._first = evaluation
        text = f"{len(self._evaluations)} evaluations. Enter shows the rollouts."
        if evaluation is not None:
            text = f"Choose what to compare with {_title(evaluation)}: Enter or c. The same evaluation again: no comparison."
        self.query_one("#position", Static).update(Text(text))

    def action_compare(self) -> None:
        """Mark the evaluation for a comparison, or compare it with the marked one."""
        if self._evaluations:
            self._choose(self._chosen(), does_mark=True)

    def action_sort(self) -> None:
        """Order the evaluations by mean reward, and back by policy."""
        self._is_by_reward = not self._is_by_reward
        self._fill()

    def on_data_table_row_selected(self) -> None:
        """Open the evaluation."""
        self._choose(self._chosen(), does_mark=False)

    def _choose(self, chosen: FoundEvaluation, *, does_mark: bool) -> None:
        first = self._first
        if first is None and does_mark:
            self.compare_with(chosen)
            return
        self.compare_with(None)
        if first is chosen:
            return
        if first is not None and first.name != chosen.name:
            _notify(self, f"{_title(first)} and {_title(chosen)} have different examples: choose one environment")
            return
        columns = [chosen] if first is None else [first, chosen]
        try:
            self.app.push_screen(RolloutView(columns))
        except ConfigError as exc:
            _notify(self, str(exc))

    def _chosen(self) -> FoundEvaluation:
        return self._shown()[self.query_one(DataTable).cursor_row]

    def _shown(self) -> list[FoundEvaluation]:
        return sorted(self._evaluations, key=_mean_reward, reverse=True) if self._is_by_reward else self._evaluations

    def _fill(self) -> None:
        table = self.query_one(DataTable)
        table.clear()
        for evaluation in self._shown():
            table.add_row(*map(Text, cells_of(evaluation)))
        self.compare_with(None)


class RolloutView(Screen[None]):
    """Shows one rollout at a time, or two of the same example."""

    AUTO_FOCUS = ""
    """No widget takes the keys: the search line would."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n,right", "move(1)", "Next"),
        Binding("p,left", "move(-1)", "Previous"),
        Binding("up", "scroll(-1)", "Up", show=False),
        Binding("down", "scroll(1)", "Down", show=False),
        Binding("pageup", "scroll_pages(-1)", "Page up", show=False),
        Binding("pagedown,space", "scroll_pages(1)", "Page down", show=False),
        Binding("home", "first", "First rollout", show=False),
        Binding("end", "last", "Last rollout", show=False),
        Binding("slash", "search", "Search", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("f", "filter", "Filter"),
        Binding("c", "compare", "Compare"),
        Binding("q,escape", "back", "Back"),
    ]

    def __init__(self, evaluations: Sequence[FoundEvaluation]) -> None:
        """Read the heads of the rollouts.

        Args:
            evaluations: one, or two of the same environment.

        Raises:
            ConfigError: a file cannot be read.
        """
        super().__init__()
        self._evaluations = evaluations
        self._rollouts = [EvaluationRollouts(evaluation.results) for evaluation in evaluations]
        self._pairs = pair_rollouts(self._rollouts)
        is_pair = len(evaluations) > 1
        self._sorts, self._filters = (PAIR_SORTS, PAIR_FILTERS) if is_pair else (SORTS, FILTERS)
        self._sort, self._filter = next(iter(self._sorts)), next(iter(self._filters))
        self._shown = self._pairs
        self._place = 0

    def compose(self) -> ComposeResult:
        """Lay out the position, a column for each evaluation, the search line and the keys."""
        yield Static(id="position")
        with Horizontal():
            for evaluation in self._evaluations:
                with VerticalScroll(classes="column", can_focus=False) as column:
                    column.border_title = Text(_title(evaluation))
                    yield Static(classes="conversation")
        yield Input(id="search", placeholder="text to look for; Enter goes to the next rollout with it")
        yield Footer()

    def on_mount(self) -> None:
        """Show the first rollout."""
        self._show()

    def on_unmount(self) -> None:
        """Close the files."""
        for rollouts in self._rollouts:
            rollouts.close()

    def action_move(self, by: int) -> None:
        """Go to another rollout."""
        self._go(self._place + by)

    def action_first(self) -> None:
        """Go to the first rollout."""
        self._go(0)

    def action_last(self) -> None:
        """Go to the last rollout."""
        self._go(len(self._shown) - 1)

    def action_scroll(self, lines: int) -> None:
        """Scroll every column by lines."""
        for column in self.query(".column").results(VerticalScroll):
            column.scroll_relative(y=lines, animate=False)

    def action_scroll_pages(self, pages: int) -> None:
        """Scroll every column by its height."""
        for column in self.query(".column").results(VerticalScroll):
            column.scroll_relative(y=pages * max(1, column.size.height - 1), animate=False)

    def action_sort(self) -> None:
        """Take the next order, and go to its first rollout."""
        self._sort = _following(self._sorts, self._sort)
        self._select()

    def action_filter(self) -> None:
        """Take the next filter, and go to its first rollout."""
        self._filter = _following(self._filters, self._filter)
        self._select()

    def action_compare(self) -> None:
        """Go back to the list to choose the evaluation to compare this one with."""
        screen = self.app.screen_stack[-2]
        if isinstance(screen, EvaluationList):
            screen.compare_with(self._evaluations[0])
        self.app.pop_screen()

    def action_search(self) -> None:
        """Ask for a text."""
        line = self.query_one("#search", Input)
        line.add_class("asked")
        line.focus()

    def action_back(self) -> None:
        """Leave the search line, or this screen."""
        line = self.query_one("#search", Input)
        if line.has_class("asked"):
            self._close_search()
        else:
            self.app.pop_screen()

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go to the next rollout that contains the text, after the last one from the first one on."""
        self._close_search()
        if not event.value:
            return
        order = [*range(self._place + 1, len(self._shown)), *range(min(self._place + 1, len(self._shown)))]
        # On a thread: to read all conversations may take seconds.
        place = await asyncio.to_thread(self._find, event.value, order)
        if not self.is_attached:  # it was left meanwhile
            return
        if place is None:
            _notify(self, f"no rollout contains {one_line(event.value)!r}")
        else:
            self._go(place)

    def _find(self, text: str, order: Iterable[int]) -> int | None:
        for place in order:
            if any(file.contains(head, text) for file, head in zip(self._rollouts, self._shown[place], strict=True)):
                return place
        return None

    def _close_search(self) -> None:
        self.query_one("#search", Input).remove_class("asked")
        self.set_focus(None)

    def _select(self) -> None:
        self._shown = sorted(filter(self._filters[self._filter], self._pairs), key=self._sorts[self._sort])
        self._go(0)

    def _go(self, place: int) -> None:
        self._place = max(0, min(place, len(self._shown) - 1))
        self._show()

    def _show(self) -> None:
        pair: RolloutPair = self._shown[self._place] if self._shown else ()
        rows = [file.row(head) for file, head in zip(self._rollouts, pair, strict=False)]
        self.query_one("#position", Static).update(self._describe_position(pair, rows))
        for index, column in enumerate(self.query(".column").results(VerticalScroll)):
            text = _conversation(rows[index]) if index < len(rows) else Text("nothing to show", style="dim")
            column.query_one(Static).update(text)
            column.scroll_home(animate=False)

    def _describe_position(self, pair: RolloutPair, rows: Sequence[RolloutRow | None]) -> Text:
        texts = [f"rollout {self._place + 1 if pair else 0} of {len(self._shown)}", f"{self._filter}, {self._sort}"]
        if pair:
            texts.insert(1, f"example {pair[0].example_id} attempt {pair[0].attempt}")
        if num_damaged := sum(rollouts.num_damaged for rollouts in self._rollouts):
            texts.append(f"{num_damaged} damaged lines skipped")
        if len(rows) > 1 and None not in rows and len({str(row.prompt) for row in rows if row is not None}) > 1:
            texts.append("the prompts differ")
        return Text(" · ".join(texts))


def _conversation(row: RolloutRow | None) -> Text:
    if row is None:
        return Text("This line is no rollout that can be shown.", style="red")
    scores = "".join(f"  {one_line(name)} {value:g}" for name, value in row.scores.items())
    turns = f"  turns {row.num_turns}" if row.num_turns else ""
    cut = "  truncated" if row.is_truncated else ""
    text = Text.assemble((f"reward {row.reward:g}", "bold"), f"{scores}{turns}{cut}\n")
    messages = [*row.prompt, *row.completion]
    for message in messages[:_MAX_MESSAGES]:
        role = one_line(str(message.get("role", "")))
        text.append(f"\n{role}\n", style=_STYLES.get(role, "bold"))
        text.append(f"{_message(message)}\n")
    if len(messages) > _MAX_MESSAGES:
        text.append(f"\n… {len(messages) - _MAX_MESSAGES} more messages", style="dim")
    return text


def _message(message: Mapping[str, Any]) -> str:
    try:
        text = message_text(message)
    except (AttributeError, KeyError, TypeError):  # a message of a form that we do not know is shown as it is
        text = str(message)
    if len(text) > _MAX_MESSAGE_CHARS:
        text = f"{text[:_MAX_MESSAGE_CHARS]}… ({len(text)} characters)"
    return printable(text.replace("\r\n", "\n").expandtabs(_TAB_COLUMNS))


def _title(evaluation: FoundEvaluation) -> str:
    return one_line(f"{evaluation.name}, {evaluation.policy}")


def _mean_reward(evaluation: FoundEvaluation) -> float:
    summary = evaluation.summary
    return summary.avg if summary is not None and summary.avg is not None else float("-inf")


def _following(names: Mapping[str, object], name: str) -> str:
    """Return the name after `name`, the first one after the last."""
    ordered = list(names)
    return ordered[(ordered.index(name) + 1) % len(ordered)]


def _notify(screen: Screen[None], text: str) -> None:
    screen.notify(text, severity="warning", markup=False)
