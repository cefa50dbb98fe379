"""An environment that writes down which variables its process has, as Python and as the kernel show them."""

import json
import os
from pathlib import Path

import verifiers as vf
from datasets import Dataset


def load_environment(file: str) -> vf.Environment:
    started_with = [entry.split(b"=")[0].decode() for entry in Path("/proc/self/environ").read_bytes().split(b"\0") if entry]
    with Path(file).open("a") as opened:
        opened.write(json.dumps([sorted(os.environ), started_with]) + "\n")
    return vf.SingleTurnEnv(dataset=Dataset.from_dict({"question": ["?"], "answer": [""]}), rubric=vf.Rubric())
