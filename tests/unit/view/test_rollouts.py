from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from support.big_run import rollout_record, write_rollouts
from trivet.config.layout import RunLayout
from trivet.transport.recording import GROUPS_FILE
from trivet.view.api import Api
from trivet.view.files import NotServed
from trivet.view.rollouts import RunRollouts
from trivet.view.run import TokenText, ViewedRun, split_text


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    random = np.random.default_rng(0)
    for step in (1, 2, 10):
        write_rollouts(layout, step, 20, random=random)
    (tmp_path / "rollouts" / "not_a_step").mkdir()
    return layout


def rollouts_of(layout: RunLayout, step: int) -> Path:
    return layout.rollouts_step(step) / "rollouts.jsonl"


def test_steps_are_in_the_order_of_their_numbers_and_new_ones_appear(layout: RunLayout):
    api = Api([ViewedRun(layout, name="run")])
    before = api.answer("/api/steps", {}, client_tag="")
    assert before.body == b"[1,2,10]"
    layout.rollouts_step(11).mkdir()
    assert api.answer("/api/steps", {}, client_tag=before.tag).body == b"[1,2,10,11]"


def test_a_page_has_its_rows_and_the_number_of_all(layout: RunLayout):
    page = RunRollouts(layout).page(rollouts_of(layout, 2), offset=15, limit=10)
    assert page.num_rows == 20
    assert [preview.line for preview in page.rows] == [15, 16, 17, 18, 19]
    assert page.envs == ["tools", "words"]


@pytest.mark.parametrize("sort", ["reward", "-reward", "advantage", "-advantage"])
def test_rows_can_be_ordered(layout: RunLayout, sort: str):
    page = RunRollouts(layout).page(rollouts_of(layout, 2), sort=sort)
    found = [getattr(preview.row, sort.removeprefix("-")) for preview in page.rows]
    assert found == sorted(found, reverse=sort.startswith("-"))


def test_rows_can_be_chosen_by_environment_and_text(layout: RunLayout):
    files = RunRollouts(layout)
    num_right = sum(rollout_record(2, index)["reward"] > 0.4 for index in range(20))
    chosen = files.page(rollouts_of(layout, 2), env="words")
    assert {preview.row.env for preview in chosen.rows} == {"words"}
    assert files.page(rollouts_of(layout, 2), contains="(2.7)").num_rows == 1
    assert files.page(rollouts_of(layout, 2), contains="ANSWER IS 391").num_rows == num_right


def test_a_row_names_its_rollout_in_full(layout: RunLayout):
    files = RunRollouts(layout)
    assert files.record(rollouts_of(layout, 10), 3) == rollout_record(10, 3)
    with pytest.raises(NotServed, match="step_10 has no rollout 20; there are 20, counted from 0"):
        files.record(rollouts_of(layout, 10), 20)


def test_damaged_and_unfinished_lines_are_skipped_and_the_former_counted(layout: RunLayout):
    path = rollouts_of(layout, 1)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(whole[0] + b"{broken}\n" + whole[1] + whole[2][:-20])
    page = RunRollouts(layout).page(path)
    assert [preview.line for preview in page.rows] == [0, 2]
    assert page.num_damaged == 1


def test_a_file_that_changed_is_read_again(layout: RunLayout):
    files = RunRollouts(layout)
    assert files.page(rollouts_of(layout, 1)).num_rows == 20
    write_rollouts(RunLayout(layout.root / "other"), 1, 3, random=np.random.default_rng(1))
    rollouts_of(RunLayout(layout.root / "other"), 1).replace(rollouts_of(layout, 1))
    assert files.page(rollouts_of(layout, 1)).num_rows == 3


def test_a_step_without_rollouts_is_told(layout: RunLayout):
    with pytest.raises(NotServed, match=r"the run has no rollouts/step_77/rollouts\.jsonl"):
        RunRollouts(layout).page(rollouts_of(layout, 77))


def test_a_link_that_leads_out_of_the_run_is_not_followed(layout: RunLayout, tmp_path_factory: pytest.TempPathFactory):
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.jsonl"
    secret.write_text('{"reward": 1}\n', encoding="utf-8")
    path = rollouts_of(layout, 1)
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(NotServed, match="leads out of the run's directory"):
        RunRollouts(layout).page(path)


def test_tokens_belong_to_their_line_and_may_be_missing(layout: RunLayout):
    files = RunRollouts(layout)
    [sample] = files.samples(layout.rollouts_step(2), 4)
    assert len(sample.token_ids_T) == 64
    (layout.rollouts_step(1) / GROUPS_FILE).unlink()
    assert files.samples(layout.rollouts_step(1), 4) == []
    (layout.rollouts_step(10) / GROUPS_FILE).write_bytes(b"damaged")
    with pytest.raises(NotServed, match="cannot be read"):
        files.samples(layout.rollouts_step(10), 4)


def byte_tokenizer() -> Tokenizer:
    """Make a tokenizer with one token for each byte, the most tokens that an unknown text can have."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", ["plain text", "größer", "two 😀😀 faces", "  spaces\n\n", "日本語"])
def test_pieces_of_a_text_are_the_text(text: str):
    tokenizer = byte_tokenizer()
    token_ids = tokenizer.encode(text).ids
    pieces = split_text(tokenizer, token_ids)
    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == text


def test_the_last_token_of_a_character_has_it():
    tokenizer = byte_tokenizer()
    assert split_text(tokenizer, tokenizer.encode("aé").ids) == ["a", "", "é"]


def test_a_run_without_tokenizer_has_no_texts_and_the_newest_is_taken(layout: RunLayout):
    texts = TokenText(layout)
    assert texts.pieces([1, 2]) is None
    for step in (2, 10):
        layout.weights_step(step).mkdir(parents=True)
    layout.weights_step(2).joinpath("tokenizer.json").write_text("{}", encoding="utf-8")
    assert texts.pieces([1, 2]) is None
    byte_tokenizer().save(str(layout.weights_step(10) / "tokenizer.json"))
    token_ids = byte_tokenizer().encode("ab").ids
    assert texts.pieces(token_ids) == ["a", "b"]
