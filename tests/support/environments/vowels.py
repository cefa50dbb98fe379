"""An environment that any model can improve at: the reward is the share of vowels in the completion."""

import verifiers as vf
from datasets import Dataset


def vowel_share(completion, **kwargs) -> float:
    text = completion[-1]["content"] or ""
    return sum(character in "aeiou" for character in text) / max(len(text), 1)


def load_environment(num_examples: int = 32, api_key: str = "") -> vf.Environment:
    dataset = Dataset.from_list([{"question": f"say {index}", "answer": ""} for index in range(num_examples)])
    return vf.SingleTurnEnv(dataset=dataset, eval_dataset=dataset, rubric=vf.Rubric(funcs=[vowel_share]))
