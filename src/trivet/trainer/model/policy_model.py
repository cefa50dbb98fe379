"""Defines the policy: a causal language model of Hugging Face, sharded over ranks, that scores tokens instead of giving logits.

Legend: T tokens of a row, N of them scored.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from trivet.config.schema.model import ComputeDtype, TrainerModelConfig
from trivet.trainer.attention.context import ContextGroup
from trivet.trainer.attention.packed import HeadDims, packs_rows, register_attention
from trivet.trainer.cpu import Lanes, MasterCasts
from trivet.trainer.measurement.fake import fake_rows
from trivet.trainer.model.blocks import find_blocks, prepare_blocks
from trivet.trainer.model.expert_parallel import GROUPS, make_expert_mesh, spread_experts
from trivet.trainer.model.experts import ExpertRouting
from trivet.trainer.model.initial_weights import build, fill, read_config
from trivet.trainer.model.logprobs import TokenScores, score_tokens
from trivet.trainer.model.supported import (
    LogitRule,
    find_decoder,
    find_logit_rule,
    find_random_rates,
    report_random_rates,
    require_divisible_heads,
    require_dtypes,
    require_model,
    require_text_decoder,
    require_whole_rows,
    why_unpacked,
)
from trivet.trainer.ranks.world import World, sum_over_ranks
from trivet.trainer.rows import RowTensors, plan_rows, to_tensors

logger = logging.getLogger(__name__)

_UNPACKED_WARNING = "rows hold one sample each, which takes longer: %s"
_CHECK_TOKENS = 40
"""Tokens of a sample in the row with which packing is checked, beyond the tokens of an attention window."""
_MAX_PACKING_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Mean difference in nats. Rounding of bfloat16 causes up to about 0.05, attention between samples about 1."""


class PolicyModel(torch.nn.Module):
    """Maps a row to the log-probabilities and entropies of its loss tokens."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        chunk_size: int,
        logit_rule: LogitRule,
        lanes: Lanes | None = None,
        shares_prefixes: bool = True,
        seq_len: int = 0,
        reduces_each_row: bool = True,
        context: ContextGroup | None = None,
    ) -> None:
        """Wrap `causal_lm`, whose logits follow from the output of its head by `logit_rule`."""
        super().__init__()
        self.causal_lm = causal_lm
        self.chunk_size = chunk_size
        """Tokens whose logits exist at one time."""
        self.lanes = lanes or Lanes()
        self.shares_prefixes = shares_prefixes
        """True: a prefix that samples of a row share is computed once."""
        self.seq_len = seq_len
        """Most tokens of a row whose samples share a prefix; 0: those of the batch's longest row."""
        self.reduces_each_row = reduces_each_row
        """True: gradients are reduced over ranks after each row; false: once a step."""
        self._context = context
        """The ranks that compute a row together."""
        self.routing = ExpertRouting(causal_lm)
        """Counts tokens of experts, and replays the experts that servers chose."""
        self._logit_rule = logit_rule
        self._casts: MasterCasts | None = None
        self.compiles_head = False
        """True: the computation that follows the head's matrix products is compiled when it first runs."""
        self.keeps_dropout = False
        """True: training mode draws the model's own dropout (`load_policy`)."""

    def train(self, mode: bool = True) -> Self:
        """Set training mode. It always draws an adapter's dropout, and the model's own only if `keeps_dropout` is true."""
        super().train(mode and self.keeps_dropout)
        for name, module in self.named_modules():
            if name.endswith(".lora_dropout"):
                module.train(mode)
        return self

    def forward(self, row: RowTensors) -> TokenScores:
        """Score the loss tokens of `row`. Collective over the ranks that compute it together."""
        assert self.packs or len(row.segments.lengths) == 1, "the rows of this model hold one sample each"
        if self._context is None or not self.packs:  # transformers' own attention needs the whole row
            return self._score(row)
        part, own = self._context.take_slice(row)
        return TokenScores(*(self._context.share_scores(scores, own, row) for scores in self._score(part)))

    def _score(self, row: RowTensors) -> TokenScores:
        self.routing.replay(row.experts_ULK)
        packing = {"position_ids": row.position_ids_1U, "segments": row.segments} if self.packs else {}
        with self.casting():
            outputs = find_decoder(self.causal_lm)(input_ids=row.token_ids_1U, use_cache=False, **packing)
            weight, bias = (self._casts.cast_of(p) if self._casts else p for p in (self.head.weight, self.head.bias))
        hidden_NH = outputs.last_hidden_state[0].index_select(0, row.predictors_N)
        if bias is not None:  # a further column of the weight, for a further feature that is always 1
            weight = torch.cat([weight, bias[:, None]], dim=1)
            hidden_NH = torch.cat([hidden_NH, hidden_NH.new_ones(len(hidden_NH), 1)], dim=1)
        return score_tokens(
            hidden_NH,
            weight,
            targets_N=row.targets_N,
            temperatures_N=row.temperatures_N / self._logit_rule.scale,
            chunk_size=self.chunk_size,
            uses_temperatures=row.uses_temperatures or self._logit_rule.scale != 1.0,
            softcap=self._logit_rule.softcap,
            is_compiled=self.compiles_head,
        )

    def cast_masters(self, dtype: torch.dtype) -> None:
        """Compute with casts of the parameters to `dtype`, where FSDP does not make them."""
        if any(parameter.dtype != dtype for parameter in self.parameters()):
            self._casts = MasterCasts(list(self.parameters()), dtype)

    def casting(self) -> AbstractContextManager[object]:
        """Return a context in which modules compute with casts of their parameters, if `cast_masters` has made any."""
        return self._casts or nullcontext()

    @property
    def packs(self) -> bool:
        """True if a row may hold several samples, between which there is no attention; false if it must hold one."""
        return packs_rows(self.causal_lm.config._attn_implementation or "")

    @property
    def embedding(self) -> torch.nn.Embedding:
        """The embedding of tokens."""
        embedding = self.causal_lm.get_input_embeddings()
        assert isinstance(embedding, torch.nn.Embedding)
        return embedding

    @property
    def head(self) -> torch.nn.Linear:
        """The language-model head. Its weight is the embedding's when they are tied."""
        head = self.causal_lm.get_output_embeddings()
        assert isinstance(head, torch.nn.Linear)
        return head

    @property
    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer changes: all, or those of the adapter."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    @property
    def hidden_matrices(self) -> list[torch.nn.Parameter]:
        """The trained matrices of blocks: without embedding, head, vectors and stacks of matrices."""
        others = {id(self.embedding.weight), id(self.head.weight)}
        return [parameter for parameter in self.trained_parameters if parameter.ndim == 2 and id(parameter) not in others]

    @property
    def num_parameters(self) -> int:
        """Parameters over all ranks; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


def torch_dtype(name: ComputeDtype) -> torch.dtype:
    """Return the dtype of this name in the configuration. `config.command` has resolved `auto` before."""
    assert name != "auto", "compute_dtype is settled by config.command before a model is loaded"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def load_policy(config: TrainerModelConfig, world: World, *, keeps_dropout: bool = False) -> PolicyModel:
    """Load the start model, sharded, in training mode. Collective.

    A single rank on a CPU is not sharded: FSDP would only copy, and its modules cannot be used by several threads.

    Args:
        keeps_dropout: draw dropout, router noise and the like at the rates of the model's own configuration. Servers draw none, so
            it must be false for a policy that is sampled from. An adapter's dropout is drawn in any case.
    """
    require_model(config.name)
    require_dtypes(config, world.device)
    hf_config = read_config(config)
    require_text_decoder(hf_config, name=config.name)
    compute_dtype = torch_dtype(config.compute_dtype)
    causal_lm = build(hf_config, config, dtype=compute_dtype if config.lora else torch_dtype(config.optimization_dtype))
    random_rates = find_random_rates(hf_config)
    has_softcap = getattr(causal_lm.config, "attn_logit_softcapping", None) is not None
    # For Gemma 2, transformers before 5.21 takes scaled_dot_product_attention, which leaves out the cap of scores.
    attention = own_attention = "eager" if has_softcap else causal_lm.config._attn_implementation or "eager"
    if reason := why_unpacked(causal_lm, seq_len=config.seq_len):
        require_whole_rows(config, reason)
        logger.warning(_UNPACKED_WARNING, reason)
    else:
        require_divisible_heads(causal_lm, config)
        attention = register_attention(
            config.attn,
            device=world.device,
            dtype=compute_dtype,
            has_special_scores=has_softcap or any(name.endswith(".sinks") for name, _ in causal_lm.named_parameters()),
            heads=HeadDims.from_config(causal_lm.config),
            divide_attention=world.context.divide_attention if world.context else None,
        )
    causal_lm.config._attn_implementation = attention
    logit_rule = find_logit_rule(causal_lm, name=config.name)
    if config.lora is not None:
        from trivet.trainer.model.lora import add_adapter

        add_adapter(causal_lm, config.lora, base_name=config.name, dtype=torch_dtype(config.optimization_dtype))
    expert_mesh = make_expert_mesh(world, ep=config.ep) if config.ep > 1 else None
    spread = spread_experts(causal_lm, expert_mesh, name=config.name) if expert_mesh is not None else []
    prepare_blocks(causal_lm, config, attention=attention, device=world.device)
    is_whole = world.size == 1 and world.device.type == "cpu" and config.lora is None and config.compile is None
    # Autograd computes checkpointed blocks again without `casting`, while FSDP casts there too.
    is_whole = is_whole and (config.ac is None or compute_dtype == torch_dtype(config.optimization_dtype))
    # Lanes share the random state, so a checkpointed block would draw other dropout masks when it is computed again.
    has_lanes = is_whole and packs_rows(attention) and not (keeps_dropout and random_rates)
    model = PolicyModel(
        causal_lm,
        chunk_size=config.fused_lm_head_chunk_size,
        logit_rule=logit_rule,
        lanes=Lanes.for_rows(seq_len=config.seq_len) if has_lanes else None,
        shares_prefixes=config.share_prefixes,
        seq_len=config.seq_len,
        reduces_each_row=config.reduce_each_row and world.size > 1,
        context=world.context,
    )
    model.keeps_dropout = keeps_dropout
    model.train()
    model.compiles_head = config.compile is not None
    if not is_whole:
        shard(model, config, world, spread=spread, expert_mesh=expert_mesh)
    fill(model, causal_lm, config, world)
    model.routing.to(world.device)
    if is_whole:
        model.cast_masters(compute_dtype)
    if model.packs:
        _check_packing(model, config, own_attention=own_attention, world=world)
    logger.info(
        "model loaded name=%s parameters=%s ranks=%s lanes=%s", config.name, model.num_parameters, world.size, model.lanes.count
    )
    if model.routing.has_experts:
        # Transformers adds the auxiliary loss of routers in its own loss, which is not used.
        logger.info(
            "experts are multiplied by %s; the routers' auxiliary loss is off (router_aux_loss_coef=%s in config.json)",
            causal_lm.config._experts_implementation,
            getattr(causal_lm.config, "router_aux_loss_coef", None),
        )
    if config.lora is not None:
        num_trained = sum(parameter.numel() for parameter in model.trained_parameters)
        logger.info("adapter added rank=%s trained_parameters=%s", config.lora.rank, num_trained)
    report_random_rates(random_rates, config.lora, keeps_dropout=keeps_dropout)
    return model


def _check_packing(model: PolicyModel, config: TrainerModelConfig, *, own_attention: str, world: World) -> None:
    """Compare the scores of a packed row with those of its samples alone; switch packing off if they differ. Collective.

    Alone, samples are computed with transformers' own attention. Two of the three samples share a prompt, and each is longer than
    the model's attention window, unless the window covers whole rows.
    """
    hf_config = model.causal_lm.config
    window = getattr(hf_config, "sliding_window", None) or 0
    size = _CHECK_TOKENS + (window if window < config.seq_len else 0)
    prompt_len = _CHECK_TOKENS // 2
    (row,) = fake_rows(
        0,
        seed=0,
        seq_len=3 * size,
        vocab_size=hf_config.vocab_size,
        num_rows=1,
        prompt_len=prompt_len,
        answer_len=size - prompt_len,
        group_size=2,
    )
    attention, packed_N, reason = hf_config._attn_implementation, None, ""
    with scoring(model), torch.compiler.set_stance("force_eager"):
        try:
            packed_N = model(to_tensors(row, device=world.device, shares_prefixes=config.share_prefixes)).logprobs_N
        except TypeError as exc:  # a block that does not pass the model's arguments on to attention
            reason = f"its blocks do not tell attention where samples end ({exc})"
        hf_config._attn_implementation = own_attention
        rows = plan_rows([row], num_ranks=1, packs=False).take(0, device=world.device)
        # After a forward pass that raised an error, FSDP frees gathered parameters only in the next complete one.
        alone_N = torch.cat([model(row).logprobs_N for row in rows])
        if packed_N is not None:
            error = sum_over_ranks(world, (packed_N - alone_N).abs().mean()).item() / world.size
            reason = f"log-probabilities of a packed row differ by {error:.2g} on average from those of its samples alone"
            if error <= _MAX_PACKING_ERROR[torch_dtype(config.compute_dtype)]:
                hf_config._attn_implementation = attention
    if not model.packs:
        require_whole_rows(config, reason)
        model.lanes = Lanes()
        logger.warning(_UNPACKED_WARNING, reason)


def has_adapter(causal_lm: PreTrainedModel) -> bool:
    """Return whether PEFT added an adapter to the model."""
    return hasattr(causal_lm, "peft_config")


def shard(
    model: PolicyModel,
    config: TrainerModelConfig,
    world: World,
    *,
    spread: Sequence[torch.nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard each block, then the rest (embedding, final norm, head) with the root, so that a tied head is in one group.

    Args:
        spread: experts that ranks hold in parts, which are sharded over the groups of `expert_mesh` alone.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(config.compute_dtype),
        reduce_dtype=torch_dtype(config.reduce_dtype),
        # Inputs carry temperatures and log-probabilities, which must stay float32.
        cast_forward_inputs=False,
    )
    # A single rank's gathered parameters are its shards: freeing and copying them again would gain nothing.
    reshard = config.reshard_after_forward and world.size > 1
    # A GPU can copy from pinned memory while it computes; without a GPU there is no pinned memory.
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if config.fsdp_cpu_offload else OffloadPolicy()
    if config.fsdp_cpu_offload and world.device.type != "cuda":
        logger.info("model.fsdp_cpu_offload does nothing here: parameters are in main memory already")
    for experts in spread:
        assert expert_mesh is not None
        groups = expert_mesh[GROUPS]
        fully_shard(experts, mesh=groups, mp_policy=policy, reshard_after_forward=reshard, offload_policy=offload)
    for module in find_blocks(model.causal_lm):
        fully_shard(module, mesh=world.mesh, mp_policy=policy, reshard_after_forward=reshard, offload_policy=offload)
    fully_shard(model, mesh=world.mesh, mp_policy=policy, reshard_after_forward=False, offload_policy=offload)
    if world.size > 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # The loss is divided by a count over all ranks already: gradients are summed, not averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


def set_last_row(model: PolicyModel, *, is_last: bool, world: World) -> None:
    """Set before a row's backward pass whether FSDP reduces its gradients: after each row, or after the last row of a step.

    A single rank always reduces once a step, because gradients then accumulate in place. With `model.reduce_each_row = false`
    several ranks do so too, but free gathered parameters after each row.
    """
    if isinstance(model, FSDPModule) and not model.reduces_each_row:
        model.set_requires_gradient_sync(is_last)
        if world.size == 1:
            model.set_reshard_after_backward(is_last)


@contextmanager
def scoring(model: PolicyModel) -> Iterator[None]:
    """Switch gradients and dropout off in the block, for scores that are compared with other scores."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
        free_gathered(model)


def free_gathered(model: PolicyModel) -> None:
    """Turn gathered parameters back into shards after a forward without a backward: optimizer and export work on shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
