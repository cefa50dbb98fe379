import pytest

from trivet.environments.apis.messages import EXAMPLE_GONE, PROMPT_DIFFERS, find_example, require_same_prompt
from trivet.errors import RolloutFailed
from trivet.wire.groups import RecordedConversation


@pytest.mark.parametrize(("examples", "example_id"), [(["a"], 1), (["a"], -1), (None, 0)])
def test_an_example_that_todays_data_does_not_have_is_gone(examples: list[str] | None, example_id: int) -> None:
    with pytest.raises(RolloutFailed) as caught:
        find_example(examples, example_id)
    assert caught.value.kind == EXAMPLE_GONE
    assert find_example(["a", "b"], 1) == "b"


def test_prompts_are_compared_by_role_and_content_alone() -> None:
    recorded = RecordedConversation(prompt=[{"role": "user", "content": "q"}], completion=[])
    require_same_prompt([{"role": "user", "content": "q", "name": "somebody"}], recorded)
    for other in ([{"role": "user", "content": "Q"}], [{"role": "system", "content": "q"}], []):
        with pytest.raises(RolloutFailed) as caught:
            require_same_prompt(other, recorded)
        assert caught.value.kind == PROMPT_DIFFERS
