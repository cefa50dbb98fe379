"""What `trivet merge` writes answers as the base with its adapter does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.adapters import publish_adapter, write_adapter
from trivet.cli.main import main
from trivet.config.layout import RunLayout


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(4, 60)[None]).logits.double()


def test_a_merged_model_equals_the_base_with_its_adapter(any_model: Path, oracle, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    publish_adapter(layout, base=any_model, version=1)
    output = tmp_path / "merged"
    assert main(["merge", str(layout.weights_step(1)), str(output)]) == 0
    merged = logits_of(AutoModelForCausalLM.from_pretrained(output))
    unmerged = logits_of(oracle.load_model(any_model, adapter=layout.weights_step(1)))
    torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-4)
    assert (logits_of(oracle.load_model(any_model)) - unmerged).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(output).get_vocab() == AutoTokenizer.from_pretrained(any_model).get_vocab()


def test_it_keeps_the_dtype_of_the_base(tiny_model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(base)
    write_adapter(tmp_path / "adapter", base=base, seed=1)
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16


def test_a_base_that_moved_is_named(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter, output = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    shutil.copytree(tiny_model, base)
    write_adapter(adapter, base=base, seed=1)
    base.rename(tmp_path / "moved")
    assert main(["merge", str(adapter), str(output)]) == 2
    assert f"base model {str(base)!r} cannot be loaded" in capsys.readouterr().err
    assert not output.exists()
    assert main(["merge", str(adapter), str(output), "--base", str(tmp_path / "moved")]) == 0
    assert output.is_dir()


def test_what_cannot_be_merged_is_refused(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(tiny_model), str(tmp_path / "merged")]) == 2
    assert "is no adapter" in capsys.readouterr().err
    layout = RunLayout(tmp_path)
    publish_adapter(layout, base=tiny_model, version=1)
    adapter = layout.weights_step(1)
    assert main(["merge", str(adapter), str(tiny_model)]) == 2
    assert "is there already" in capsys.readouterr().err
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"r": 4}))
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) != 0
    assert "is not what was published" in capsys.readouterr().err
