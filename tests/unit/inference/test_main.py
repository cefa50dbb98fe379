import importlib.metadata
from argparse import Namespace
from enum import Enum
from pathlib import Path

import pytest

from trivet.checkpoints.run_record import write_run
from trivet.config.layout import RunLayout
from trivet.config.schema.shared import RunIdentity
from trivet.errors import ConfigError
from trivet.inference import vllm_names
from trivet.inference.main import LOGITS_PROCESSORS, is_foreign_run_active, make_engine_config, warn_of_logits_processors
from trivet.process.lock import FileLock


def test_a_server_that_the_run_did_not_start_keeps_out_of_its_reports(tmp_path: Path) -> None:
    """Servers of the run report, on whichever node they are. Their parent need not be the launcher that holds the lock."""
    layout, own, by_hand = RunLayout(tmp_path), RunIdentity(id="a-run", attempt=2), RunIdentity()
    write_run(layout, RunIdentity(id="a-run", attempt=3))  # a server stays while the attempts of the other roles go by
    assert not is_foreign_run_active(tmp_path, run=by_hand)
    with FileLock(layout.lock, what="the run"):
        assert is_foreign_run_active(tmp_path, run=by_hand)
        assert is_foreign_run_active(tmp_path, run=RunIdentity(id="another"))
        assert not is_foreign_run_active(tmp_path, run=own)
    assert not is_foreign_run_active(tmp_path, run=by_hand)


class UsageContext(Enum):
    OPENAI_API_SERVER = "OPENAI_API_SERVER"


class EngineArgs:
    """Stands in for vLLM's, which takes long to import."""

    def __init__(self, model: str, caches_prefixes: bool | None) -> None:
        self.model, self.caches_prefixes = model, caches_prefixes

    @classmethod
    def from_cli_args(cls, args: Namespace) -> "EngineArgs":
        return cls(args.model, getattr(args, "enable_prefix_caching", None))

    def create_engine_config(self, usage_context: UsageContext | None = None, headless: bool = False) -> Namespace:
        if self.model == "unknown":
            raise ValueError("no such architecture")
        if self.model == "hybrid" and self.caches_prefixes is not False:
            raise ValueError("Chunked prefill is required for mamba cache mode 'align'.")
        assert usage_context is not None
        return Namespace(
            text=f"{self.model} for {usage_context.value}{' without a server' if headless else ''}",
            model_config=Namespace(hf_text_config=Namespace(**({"qk_rope_head_dim": 64} if self.model == "latent" else {}))),
            compilation_config=Namespace(custom_ops=["all"]),
        )


def test_the_engine_is_configured_for_an_api_server_or_its_refusal_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_names, "AsyncEngineArgs", EngineArgs, raising=False)
    monkeypatch.setattr(vllm_names, "UsageContext", UsageContext, raising=False)

    def arguments(**values: object) -> Namespace:
        return Namespace(enable_return_routed_experts=False, **values)

    plain = make_engine_config(arguments(model="m"))
    assert (plain.text, plain.compilation_config.custom_ops) == ("m for OPENAI_API_SERVER", ["all"])
    latent = make_engine_config(arguments(model="latent")).compilation_config
    assert latent.custom_ops == ["all", *["-rotary_embedding"] * vllm_names.current_platform.is_cpu()]
    shard = make_engine_config(arguments(model="m", headless=True))
    assert shard.text == "m for OPENAI_API_SERVER without a server"
    with pytest.raises(ConfigError, match=r"cannot serve inference\.model\.name 'unknown' as configured: no such architecture"):
        make_engine_config(arguments(model="unknown"))
    args = arguments(model="hybrid", enable_prefix_caching=None)  # its prefixes cannot be cached
    assert make_engine_config(args).text == "hybrid for OPENAI_API_SERVER"
    assert args.enable_prefix_caching is False


def test_processors_of_installed_packages_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = [importlib.metadata.EntryPoint(name="p", value="package.module:Processor", group=LOGITS_PROCESSORS)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found if group == LOGITS_PROCESSORS else [])
    warn_of_logits_processors()
    assert "vLLM applies the logits processor package.module:Processor of an installed package" in caplog.text
