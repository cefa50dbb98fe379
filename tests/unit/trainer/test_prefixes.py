"""Samples that begin alike become a tree of segments; every sample can be read back from it."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from trivet.trainer.prefixes import MIN_SAVED_TOKENS, build_tree, group_by_prefix

PROMPT = list(range(100, 100 + MIN_SAVED_TOKENS + 4))


def arrays(samples: list[list[int]]) -> list[np.ndarray]:
    return [np.array(sample, dtype=np.int32) for sample in samples]


@st.composite
def conversations(draw: st.DrawFn) -> list[list[int]]:
    """Samples that continue one another at random places, some of them equal."""
    samples = [draw(st.lists(st.integers(0, 2), min_size=1, max_size=60))]
    for _ in range(draw(st.integers(0, 7))):
        earlier = draw(st.sampled_from(samples))
        kept = draw(st.integers(0, len(earlier)))
        samples.append(earlier[:kept] + draw(st.lists(st.integers(0, 2), min_size=0 if kept else 1, max_size=40)))
    return samples


@given(conversations())
def test_every_sample_is_the_path_of_its_segments(samples: list[list[int]]) -> None:
    tokens = np.concatenate(arrays(samples))
    tree = build_tree(arrays(samples))
    assert tokens[tree.sources_U][tree.computed_indices_T].tolist() == tokens.tolist()
    starts = np.cumsum([0, *tree.lengths])
    segment_U = np.repeat(np.arange(len(tree.lengths)), tree.lengths)
    for places in np.split(tree.computed_indices_T, np.cumsum([len(sample) for sample in samples])[:-1]):
        last = int(segment_U[places[-1]])
        path = [*tree.path(last), last]
        assert places.tolist() == [place for each in path for place in range(starts[each], starts[each + 1])][: len(places)]
        assert [tree.prefix_lengths[each] for each in path] == np.cumsum(
            [0, *(tree.lengths[each] for each in path[:-1])]
        ).tolist()


@given(conversations())
def test_a_segment_is_shared_where_that_saves_enough(samples: list[list[int]]) -> None:
    tree = build_tree(arrays(samples))
    segment_U = np.repeat(np.arange(len(tree.lengths)), tree.lengths)
    paths = [
        {int(segment) for segment in segment_U[places]}
        for places in np.split(tree.computed_indices_T, np.cumsum([len(sample) for sample in samples])[:-1])
    ]
    for segment, length in enumerate(tree.lengths):
        num_copies = sum(segment in path for path in paths) - 1
        assert num_copies == 0 or num_copies * length >= MIN_SAVED_TOKENS


def test_a_short_prompt_behind_a_long_one_of_all_groups_is_computed_once_too() -> None:
    """As the prompts of one environment are: the same instruction, and a few tokens of their own."""
    samples = [[*PROMPT, *range(10 * group, 10 * group + 8), 900 + answer] for group in range(4) for answer in range(4)]
    assert build_tree(arrays(samples)).num_tokens == len(PROMPT) + 4 * (8 + 4)


def test_a_prompt_is_computed_once_for_all_its_answers() -> None:
    tree = build_tree(arrays([[*PROMPT, 1, 2], [*PROMPT, 3], [*PROMPT, 1, 4, 5]]))
    assert tree.parents == (-1, 0, 0, 0)
    assert tree.num_tokens == len(PROMPT) + 2 + 1 + 3


def test_samples_that_share_little_keep_their_order() -> None:
    samples = arrays([[3, 1, 2], [3, 1, 9, 9], [1]])
    tree = build_tree(samples)
    assert tree.lengths == (3, 4, 1)
    assert tree.computed_indices_T.tolist() == list(range(8))


PAIRS = [
    [*PROMPT, *range(10 * pair, 10 * pair + 8), *range(900 + answer, 930 + answer)] for pair in range(4) for answer in (0, 50)
]
"""Samples whose second beginning saves too little to be shared."""


@given(conversations(), st.integers(1, 80))
@example(samples=PAIRS, max_tokens=len(PROMPT) + 2 * (8 + 60))
def test_no_group_has_more_to_compute_than_the_cap(samples: list[list[int]], max_tokens: int) -> None:
    groups = group_by_prefix(arrays(samples), max_tokens=max_tokens)
    assert sorted(index for group in groups for index in group) == list(range(len(samples)))
    for group in groups:
        assert len(group) == 1 or build_tree(arrays([samples[index] for index in group])).num_tokens <= max_tokens
