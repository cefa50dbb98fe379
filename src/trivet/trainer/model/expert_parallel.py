"""Spreads the experts of a mixture over ranks (`model.ep`): a token travels to the ranks that hold its experts, and back.

Called by `trainer.model.policy_model` before the model is sharded. A stack of experts is one tensor over the ranks of an expert
group: each holds a part of the experts, which FSDP shards further over the ranks of other groups that hold the same part. So
checkpoints, norms and exports see the whole stack under its own name. Gradients are sums over all ranks: a rank computes its
experts for the tokens of its whole group, and FSDP adds up the groups.

Every rank takes part in the same exchanges, because all ranks compute equally many rows.

Legend: U tokens of a rank, K experts of a token, R tokens that a rank receives, P ranks of the group, D features.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single  # the form with a gradient
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from trivet.config.check_roles import ranks_problem
from trivet.errors import ConfigError
from trivet.trainer.model.experts import find_experts
from trivet.trainer.ranks.world import World, prove_ranks

GROUPS, EXPERTS = "expert_groups", "experts"
"""Names of the dimensions of the mesh: the groups, over which FSDP shards a part of the experts, and the parts."""


def make_expert_mesh(world: World, *, ep: int) -> DeviceMesh:
    """Return a mesh in which `ep` consecutive ranks form a group. Collective.

    Raises:
        ConfigError: the ranks cannot be divided into such groups.
    """
    if problem := ranks_problem({"model.ep": ep}, num_ranks=world.size, ranks="the trainer's ranks"):
        raise ConfigError(problem)
    mesh = init_device_mesh(world.device.type, (world.size // ep, ep), mesh_dim_names=(GROUPS, EXPERTS))
    for group in mesh.get_all_groups():
        prove_ranks(group, world.secret)
    return mesh


def spread_experts(causal_lm: PreTrainedModel, mesh: DeviceMesh, *, name: str) -> list[torch.nn.Module]:
    """Give this rank its part of each stack of experts, on the meta device, and return the modules that hold the stacks.

    Args:
        name: the model's name, for messages.

    Raises:
        ConfigError: the model has no experts, or they cannot be divided evenly.
    """
    part_mesh = mesh[EXPERTS]
    num_parts = part_mesh.size()
    found = [experts for module in causal_lm.modules() if (experts := find_experts(module)) is not None]
    if not found:
        raise ConfigError(
            f"model.ep = {num_parts} distributes experts, and model.name = {name!r} has none to distribute; remove model.ep"
        )
    for experts in found:
        num_experts = int(experts.num_experts)  # type: ignore[arg-type]  transformers' modules have it
        if num_experts % num_parts:
            raise ConfigError(
                f"model.ep ({num_parts}) must divide the experts of model.name ({num_experts}): {num_experts} % {num_parts} = "
                f"{num_experts % num_parts}"
            )
        for key, stack in list(experts.named_parameters(recurse=False)):
            part = torch.empty(num_experts // num_parts, *stack.shape[1:], dtype=stack.dtype, device="meta")
            spread = DTensor.from_local(part, part_mesh, [Shard(0)], run_check=False)
            setattr(experts, key, torch.nn.Parameter(spread, requires_grad=stack.requires_grad))
        experts.forward = _exchange_tokens(experts, experts.forward, part_mesh)
    return found


def _exchange_tokens(experts: torch.nn.Module, forward: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
    """Wrap `forward` so that it computes this rank's experts for the tokens of all ranks of the group."""
    group, num_parts = mesh.get_group(), mesh.size()
    num_experts = int(experts.num_experts)  # type: ignore[arg-type]
    num_own = num_experts // num_parts
    first = mesh.get_local_rank() * num_own

    def compute_own(hidden_RD: torch.Tensor, chosen_R: torch.Tensor) -> torch.Tensor:
        """Compute each token with its expert. A token of zeros comes last, so that every rank has a gradient to reduce."""
        hidden_RD = torch.cat([hidden_RD, hidden_RD.new_zeros(1, hidden_RD.shape[1])])
        chosen_R = torch.cat([chosen_R, chosen_R.new_zeros(1)])
        stacks = {key: stack for key, stack in experts.named_parameters(recurse=False) if isinstance(stack, DTensor)}
        # An attribute of the instance hides the parameter of its name: the module computes with the part as a plain tensor.
        experts.__dict__.update({key: stack.to_local() for key, stack in stacks.items()}, num_experts=num_own)
        try:
            return forward(hidden_RD, chosen_R[:, None], hidden_RD.new_ones(len(chosen_R), 1))[:-1]
        finally:
            experts.__dict__["num_experts"] = num_experts
            for key in stacks:
                del experts.__dict__[key]

    @torch.compiler.disable
    def run(hidden_UD: torch.Tensor, chosen_UK: torch.Tensor, weights_UK: torch.Tensor) -> torch.Tensor:
        chosen, order = chosen_UK.flatten().sort(stable=True)
        tokens = order // chosen_UK.shape[1]
        sent = torch.bincount(chosen // num_own, minlength=num_parts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        counts = sent.tolist(), received.tolist()
        own = chosen.new_empty(sum(counts[1]))
        dist.all_to_all_single(own, chosen, counts[1], counts[0], group=group)
        hidden_RD = all_to_all_single(hidden_UD[tokens], counts[1], counts[0], group)
        outputs = all_to_all_single(compute_own(hidden_RD, own - first), counts[0], counts[1], group)
        weighted = outputs * weights_UK.flatten()[order][:, None]
        return torch.zeros_like(hidden_UD).index_add(0, tokens, weighted.to(hidden_UD.dtype))

    return run
