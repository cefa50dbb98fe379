"""A search index over short articles: BM25, in memory.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), with k1 = 1.5, b = 0.75.
"""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from wiki_search.world import Article

K1 = 1.5
B = 0.75
TITLE_WEIGHT = 2
"""Words of the title count as if they stood this many times in the text."""

_WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case and without accents: a query need not be typed with them."""
    if not text.isascii():
        text = "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    return _WORD.findall(text.lower())


class Index:
    """An index over a list of articles.

    >>> index = Index(articles)
    >>> [article.title for article in index.search("bridge over the Cadd", limit=3)]

    Legend: A articles, P postings, which are the pairs of a word and an article that has it, sorted by word.
    """

    def __init__(self, articles: Sequence[Article]) -> None:
        self._articles = list(articles)
        self._word_ids: dict[str, int] = {}
        num_words_A = np.zeros(len(articles), dtype=np.int64)
        word_ids: list[int] = []
        for number, article in enumerate(articles):
            words = words_of(article.title) * TITLE_WEIGHT + words_of(article.text)
            word_ids += [self._word_ids.setdefault(word, len(self._word_ids)) for word in words]
            num_words_A[number] = len(words)
        keys = np.asarray(word_ids, dtype=np.int64) * len(articles) + np.repeat(np.arange(len(articles)), num_words_A)
        keys_P, times_P = np.unique(keys, return_counts=True)
        word_P, self._article_P = np.divmod(keys_P, max(len(articles), 1))
        self._starts = np.searchsorted(word_P, np.arange(len(self._word_ids) + 1))
        num_articles_P = np.diff(self._starts)[word_P]
        rarity_P = np.log(1 + (len(articles) - num_articles_P + 0.5) / (num_articles_P + 0.5))
        length_A = 1 - B + B * num_words_A / max(num_words_A.mean() if len(articles) else 0.0, 1e-9)
        self._score_P = rarity_P * times_P * (K1 + 1) / (times_P + K1 * length_A[self._article_P])

    def search(self, query: str, *, limit: int) -> list[Article]:
        """Return the best articles, best first, without those that share no word with the query."""
        scores_A = self._scores(query)
        num_best = min(limit, int(np.count_nonzero(scores_A)))
        best = np.argsort(-scores_A, kind="stable")[:num_best]
        return [self._articles[number] for number in best]

    def scores(self, query: str) -> dict[int, float]:
        """Return the score of each article that shares a word with the query, by its index in the list."""
        scores_A = self._scores(query)
        return {int(number): float(scores_A[number]) for number in np.flatnonzero(scores_A)}

    def _scores(self, query: str) -> np.ndarray:
        scores_A = np.zeros(len(self._articles))
        for word in sorted(set(words_of(query)) & self._word_ids.keys()):
            number = self._word_ids[word]
            of_word = slice(self._starts[number], self._starts[number + 1])
            scores_A[self._article_P[of_word]] += self._score_P[of_word]
        return scores_A
