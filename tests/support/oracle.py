"""Computes a model's answers by plain transformers in float32, as the reference for a server's answers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Oracle:
    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def greedy(self, prompt: Sequence[int], *, num_tokens: int) -> list[int]:
        """Return the likeliest continuation. Stop tokens do not end it."""
        token_ids = list(prompt)
        for _ in range(num_tokens):
            token_ids.append(int(self._logits(token_ids)[-1].argmax()))
        return token_ids[len(prompt) :]

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int], *, temperature: float) -> list[float]:
        """Return the log-probability of each token of `completion` in the distribution it was sampled from."""
        logits = self._logits([*prompt, *completion])[len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
        return logprobs[torch.arange(len(completion)), torch.tensor(completion)].tolist()

    @torch.no_grad()
    def _logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self._model(torch.tensor([list(token_ids)])).logits[0]
