"""Kernels of a package are put behind torch's flash attention, or refused. Stand-ins for both run on the CPU."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import attention

from trivet.errors import ConfigError
from trivet.trainer.attention import packed
from trivet.trainer.attention.choice import PROBE_LENGTHS, PROBE_PATHS, HeadDims, replace_kernels

CPU = torch.device("cpu")
HEADS = HeadDims(query=16, value=16)


class Handle:
    """Stands for the registration that torch keeps of activated kernels."""

    def remove(self) -> None:
        """Nothing was registered."""


@pytest.fixture(autouse=True)
def _implementations() -> Iterator[None]:
    """Register stand-ins under torch's names; restore what torch had."""
    before = dict(attention._registry._FLASH_ATTENTION_IMPLS)
    for name in ("FA3", "FA4"):
        attention.register_flash_attention_impl(name, register_fn=Handle)
    yield
    attention.restore_flash_attention_impl(_raise_warn=False)
    attention._registry._FLASH_ATTENTION_IMPLS.clear()
    attention._registry._FLASH_ATTENTION_IMPLS.update(before)


class DoubledGradient(torch.autograd.Function):
    """Passes values on, and doubles their gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, faults: dict[str, str]) -> torch.Tensor:
    """Compute attention by torch; kernels in `faults` do it with that fault."""
    fault = faults.get(str(attention.current_flash_attention_impl()))
    if fault == "fails":
        raise RuntimeError("no kernel image\nfor this GPU")
    paths = ((), (), ()) if fault == "forgets prefixes" else PROBE_PATHS
    segments = packed.Segments.from_paths(PROBE_LENGTHS, paths, device=CPU)
    inputs = (DoubledGradient.apply(query) if fault == "wrong gradient" else query, key, value)
    output = packed.sdpa_packed(torch.nn.Identity(), *inputs, None, segments=segments)[0]
    return output * torch.nan if fault == "no number" else output


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (None, None),
        ("forgets prefixes", r"the output differs by \d+\.\d% from that of torch's own kernels"),
        ("no number", r"the output differs by nan% from"),
        ("wrong gradient", r"the gradient of queries differs by 100\.0% from"),
        ("fails", r"its kernels failed on a small row \(RuntimeError: no kernel image\)$"),
    ],
)
def test_kernels_stay_where_they_agree_with_torchs_own(fault: str | None, reason: str | None) -> None:
    faults = {} if fault is None else {"FA4": fault}
    found = replace_kernels("flash_attention_4", partial(attend, faults=faults), head_dim=16, device=CPU, dtype=torch.bfloat16)
    if reason is None:
        assert found is None
        assert attention.current_flash_attention_impl() == "FA4"
    else:
        assert found is not None
        assert re.search(reason, found)
        assert attention.current_flash_attention_impl() is None


def test_kernels_are_compared_with_torchs_own_also_where_others_were_active() -> None:
    attention.activate_flash_attention_impl("FA3")
    faults = {"FA3": "forgets prefixes", "FA4": "forgets prefixes"}
    found = replace_kernels("flash_attention_4", partial(attend, faults=faults), head_dim=16, device=CPU, dtype=torch.bfloat16)
    assert found is not None
    assert attention.current_flash_attention_impl() is None


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU of compute capability 9.0 with every package; the kernels are compared on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(packed, "_is_installed", lambda module: True)
    monkeypatch.setattr(packed, "replace_kernels", lambda *args, device, **more: replace_kernels(*args, device=CPU, **more))
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("faults", "active"),
    [
        ({}, "FA3"),
        ({"FA3": "wrong gradient"}, "FA4"),
        ({"FA3": "wrong gradient", "FA4": "fails"}, None),
    ],
)
def test_auto_does_not_use_kernels_that_disagree_and_says_why(
    faults: dict[str, str], active: str | None, hopper: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(packed, "_attend_test_row", lambda *inputs, device: attend(*inputs, faults=faults))
    name = packed.register_attention("auto", device=hopper, dtype=torch.bfloat16, heads=HEADS)
    assert name in packed.TRACEABLE_ATTENTIONS
    assert attention.current_flash_attention_impl() == active
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(faults)
    if faults:
        assert "does not use flash_attention_3, which is installed: the gradient of queries differs by 100.0%" in warnings[0]


def test_kernels_that_were_asked_for_and_disagree_are_refused(hopper: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_attend_test_row", lambda *inputs, device: attend(*inputs, faults={"FA3": "fails"}))
    with pytest.raises(ConfigError, match=r'"flash_attention_3" cannot be used: its kernels failed .* "flash_varlen"'):
        packed.register_attention("flash_attention_3", device=hopper, dtype=torch.bfloat16, heads=HEADS)
