"""A search index over short articles: BM25, in memory.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), with k1 = 1.5, b = 0.75.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from wiki_search.world import Article

K1 = 1.5
B = 0.75
TITLE_WEIGHT = 2
"""Words of the title count as if they stood this many times in the text."""

_WORD = re.compile(r"[a-z0-9]+")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


class Index:
    """An index over a list of articles.

    >>> index = Index(articles)
    >>> [article.title for article in index.search("bridge over the Cadd", limit=3)]
    """

    def __init__(self, articles: Sequence[Article]) -> None:
        self._articles = list(articles)
        counts = [Counter(words_of(article.title) * TITLE_WEIGHT + words_of(article.text)) for article in articles]
        self._lengths = [sum(count.values()) for count in counts]
        self._mean_length = sum(self._lengths) / max(len(counts), 1)
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, count in enumerate(counts):
            for word, times in count.items():
                self._postings[word].append((number, times))

    def search(self, query: str, *, limit: int) -> list[Article]:
        """Return the best articles, best first, without those that share no word with the query."""
        scores = self.scores(query)
        best = sorted(scores, key=lambda number: (-scores[number], number))
        return [self._articles[number] for number in best[:limit]]

    def scores(self, query: str) -> dict[int, float]:
        """Return the score of each article that shares a word with the query, by its index in the list."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(words_of(query)):
            postings = self._postings.get(word, [])
            rarity = math.log(1 + (len(self._articles) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, times in postings:
                length = 1 - B + B * self._lengths[number] / self._mean_length
                scores[number] += rarity * times * (K1 + 1) / (times + K1 * length)
        return dict(scores)
