import pytest
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


@pytest.mark.parametrize(
    ("tokenizer", "known", "text", "expected"),
    [
        pytest.param(Pieces("a", "b", "ab", "|"), [0, 1, 3], "ab|ab", [0, 1, 3, 2], id="their text would become others"),
        pytest.param(Pieces("a", "b", "|"), [0, 1, 2], "ac|a", None, id="a text that says something else"),
        pytest.param(
            Pieces("|", "a", " ", " a", starts_with_space=True),
            [2, 1, 0],
            " a|a",
            [2, 1, 0, 1],
            id="not as the start of a text",
        ),
        pytest.param(Pieces("a", "b", "ab"), [0], "ab", [0, 1], id="a last token that would join what is new"),
    ],
)
def test_known_tokens_stay_as_they_are(tokenizer: Pieces, known: list[int], text: str, expected: list[int] | None):
    assert continue_tokens(known, text=text, tokenizer=tokenizer) == expected


@pytest.mark.parametrize(
    ("known", "text", "expected"),
    [
        pytest.param("user: hi|  yes \n|", "user: hi|yes|\nuser: more|", "\nuser: more|", id="a trimmed answer"),
        pytest.param(
            '<call>{"name":"f",\n "arguments":{"x":1}}</call>|',
            '<call>\n{"name": "f", "arguments": {"x": 1}}\n</call>|\ntool: 1|\n',
            "\ntool: 1|\n",
            id="a tool call in other JSON",
        ),
        pytest.param("hello \n", "hello \n|next", "|next", id="white space at the end of a cut answer"),
        pytest.param("a  b \n", "a b \n|next", "|next", id="and within it"),
        pytest.param("a  b \n", "a b|next", "|next", id="and left out"),
        pytest.param("na\ufffd", "na|next", "|next", id="half a letter at the end of a cut answer"),
        pytest.param("na\ufffd", "na\ufffd|next", "|next", id="and written"),
        pytest.param("<think>\nhm\n</think>\nyes|", "yes|\nuser: more|", None, id="thinking that is left out is a difference"),
    ],
)
def test_what_follows_an_earlier_turn_is_found(known: str, text: str, expected: str | None):
    assert text_after(known, text=text) == expected


@given(known=st.text(alphabet="ab \n|\ufffd"), rest=st.text(alphabet="ab \n|"))
def test_whatever_follows_the_known_text_itself_is_what_is_new(known, rest):
    assert text_after(known, text=known + rest) == rest


@given(words=st.lists(st.sampled_from(["a", "b", "{", "}"]), max_size=8), data=st.data(), rest=st.text(alphabet="ab \n|"))
def test_white_space_never_moves_the_end_of_a_turn(words, data, rest):
    def spaced() -> str:
        return "".join(data.draw(st.sampled_from(["", " ", "\n", "\t "])) + word for word in [*words, "|"])

    assert text_after(spaced(), text=spaced() + rest) == rest
