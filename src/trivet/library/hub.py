"""Writes the model card of a policy, and uploads both to the Hugging Face hub.

The card states what the files of the run prove: data, rewards, steps, commit and the result of `trivet check`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from trivet.checkpoints.commit import committed_steps, read_record
from trivet.config.layout import RunLayout
from trivet.config.masking import mask_table
from trivet.dependencies import own_version
from trivet.errors import ConfigError, TrivetError
from trivet.history.check import check_run
from trivet.view.run import read_config
from trivet.weights.adapters import is_adapter
from trivet.weights.manifest import read_manifest

if TYPE_CHECKING:
    from trivet.library.run import Policy, RunStep

_NUM_AVERAGED = 5
"""Steps at the start and at the end of a run whose mean reward the card states."""


def upload(directory: Path, repo_id: str, *, private: bool | None, token: str | None, message: str) -> str:
    """Upload a directory as a model; return the address of the commit. Raises a ConfigError that has the hub's own answer."""
    from huggingface_hub import HfApi  # here: takes half a second to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        return api.upload_folder(repo_id=repo_id, folder_path=directory, commit_message=message).commit_url
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled) as exc:
        raise ConfigError(
            f"{repo_id!r} cannot be pushed to {api.endpoint}: {exc}; log in with `hf auth login`, or give token=…"
        ) from exc


def write_card(directory: Path, policy: "Policy", *, name: str, steps: Sequence["RunStep"]) -> None:
    """Write README.md of a saved policy into its directory."""
    from huggingface_hub import ModelCardData  # here: takes half a second to import

    layout = RunLayout(policy.directory.parent.parent)
    is_rl = (layout.configs / "orchestrator.toml").exists()
    base = str(read_config(layout, "trainer" if is_rl else "sft").get("model", {}).get("name", ""))
    front = ModelCardData(
        base_model=base if base and not Path(base).exists() else None,  # a directory of this machine is no model of the hub
        library_name="peft" if is_adapter(directory) else "transformers",
        pipeline_tag="text-generation",
        tags=["trivet", *(["reinforcement-learning"] if is_rl else [])],
    )
    facts = [
        ("start model", Path(base).name if Path(base).exists() else base),
        *(("data", text) for text in _data(layout)),
        ("reward", _reward([step for step in steps if step.number <= policy.version])),
        ("steps", str(policy.version)),
        ("policy", f"version {policy.version}, SHA-256 {read_manifest(policy.directory).digest}"),
        ("commit", _commit(layout, policy.version)),
        ("proof", _proof(layout)),
    ]
    rows = "\n".join(f"| {label} | {text.replace('|', '&#124;')} |" for label, text in facts if text)
    method = "reinforcement learning" if is_rl else "supervised fine-tuning"
    text = f"# {name}\n\nTrained with trivet {own_version()} by {method}.\n\n| | |\n|---|---|\n{rows}\n"
    (directory / "README.md").write_text(f"---\n{front.to_yaml()}\n---\n{text}", encoding="utf-8")


def _data(layout: RunLayout) -> Iterator[str]:
    """Yield a line for each data set of fine-tuning or environment: its name, and what it is made of, without secrets."""
    if name := read_config(layout, "sft").get("data", {}).get("name"):
        yield Path(str(name)).name if Path(str(name)).exists() else str(name)
    for env in read_config(layout, "orchestrator").get("env", []):
        args = env.get("args") or {}
        described = ", ".join(f"{key}: {value}" for key, value in mask_table(args.get("made_of") or args).items() if value)
        yield f"{env.get('name') or env['id']}{f' ({described})' if described else ''}"


def _reward(steps: Sequence["RunStep"]) -> str:
    """Describe the mean reward at both ends of the run; empty without rewards, as in fine-tuning."""
    values = [step.metrics["reward/mean"] for step in steps if "reward/mean" in step.metrics]
    first, last = values[:_NUM_AVERAGED], values[-_NUM_AVERAGED:]
    return f"{fmean(first):.4g} in the first {len(first)} steps, {fmean(last):.4g} in the last" if values else ""


def _commit(layout: RunLayout, version: int) -> str:
    """Describe the newest checkpoint that the policy includes."""
    committed = [step for step in committed_steps(layout) if step <= version]
    if not committed:
        return "no checkpoint of this step or an earlier one is left"
    return f"step {committed[-1]}, SHA-256 {read_record(layout, committed[-1]).digest}"


def _proof(layout: RunLayout) -> str:
    """Describe what `trivet check` finds in the run's files."""
    try:
        ledger = check_run(layout).ledger
    except TrivetError as exc:
        return f"the run's files cannot be checked: {exc}"
    if ledger.breaches:
        return f"broken: {len(ledger.breaches)} of {ledger.checks:,} statements of `trivet check` do not hold"
    return f"consistent: {ledger.checks:,} statements of `trivet check` hold: rollouts trained once, versions, commits"
