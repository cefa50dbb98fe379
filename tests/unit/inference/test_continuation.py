from hypothesis import given
from hypothesis import strategies as st

from trivet.inference.continuation import continue_tokens, text_after


class Pieces:
    """A tokenizer of numbered pieces, which encodes the longest that fits. As in some tokenizers of sentences, a word that
    starts a text gets a space."""

    def __init__(self, *pieces: str, starts_with_space: bool = False) -> None:
        self.pieces = list(pieces)
        self.starts_with_space = starts_with_space

    def decode(self, token_ids, *, skip_special_tokens: bool) -> str:
        return "".join(self.pieces[token_id] for token_id in token_ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.starts_with_space and text[:1].isalpha():
            text = " " + text
        token_ids = []
        while text:
            piece = max((piece for piece in self.pieces if text.startswith(piece)), key=len)
            token_ids.append(self.pieces.index(piece))
            text = text.removeprefix(piece)
        return token_ids


def test_known_tokens_stay_as_they_are_though_their_text_would_become_others():
    tokenizer = Pieces("a", "b", "ab", "|")
    assert tokenizer.encode("ab|ab", add_special_tokens=False) == [2, 3, 2]
    assert continue_tokens([0, 1, 3], text="ab|ab", tokenizer=tokenizer) == [0, 1, 3, 2]


def test_a_text_that_says_something_else_is_not_continued():
    assert continue_tokens([0, 1, 2], text="ac|a", tokenizer=Pieces("a", "b", "|")) is None


def test_what_is_new_is_tokenised_where_it_stands_and_not_as_the_start_of_a_text():
    tokenizer = Pieces("|", "a", " ", " a", starts_with_space=True)
    assert continue_tokens([2, 1, 0], text=" a|a", tokenizer=tokenizer) == [2, 1, 0, 1]


def test_a_last_token_that_would_join_what_is_new_is_still_kept():
    tokenizer = Pieces("a", "b", "ab")
    assert continue_tokens([0], text="ab", tokenizer=tokenizer) == [0, 1]


def test_what_follows_a_trimmed_answer_is_found():
    assert text_after("user: hi|  yes \n|", text="user: hi|yes|\nuser: more|") == "\nuser: more|"


def test_what_follows_a_tool_call_is_found_though_its_json_is_written_otherwise():
    sampled = '<call>{"name":"f",\n "arguments":{"x":1}}</call>|'
    written = '<call>\n{"name": "f", "arguments": {"x": 1}}\n</call>|'
    assert text_after(sampled, text=written + "\ntool: 1|\n") == "\ntool: 1|\n"


def test_white_space_that_a_cut_answer_ended_with_is_not_said_twice():
    assert text_after("hello \n", text="hello \n|next") == "|next"
    assert text_after("a  b \n", text="a b \n|next") == "|next"
    assert text_after("a  b \n", text="a b|next") == "|next"


def test_half_a_letter_at_the_end_of_a_cut_answer_is_no_difference():
    assert text_after("na\ufffd", text="na|next") == "|next"
    assert text_after("na\ufffd", text="na\ufffd|next") == "|next"


def test_thinking_that_the_template_leaves_out_is_a_difference():
    assert text_after("<think>\nhm\n</think>\nyes|", text="yes|\nuser: more|") is None


@given(known=st.text(alphabet="ab \n|\ufffd"), rest=st.text(alphabet="ab \n|"))
def test_whatever_follows_the_known_text_itself_is_what_is_new(known, rest):
    assert text_after(known, text=known + rest) == rest


@given(words=st.lists(st.sampled_from(["a", "b", "{", "}"]), max_size=8), data=st.data(), rest=st.text(alphabet="ab \n|"))
def test_white_space_never_moves_the_end_of_a_turn(words, data, rest):
    def spaced() -> str:
        return "".join(data.draw(st.sampled_from(["", " ", "\n", "\t "])) + word for word in [*words, "|"])

    assert text_after(spaced(), text=spaced() + rest) == rest
