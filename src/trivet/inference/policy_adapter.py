"""The adapter that makes the policy out of the start model. Every request for the policy names it, from version 0 on.

So a completion that a new policy comes in the middle of needs nothing done to it: the adapter it names has new weights. Before
the first policy these are zeros.
"""

from vllm.lora.request import LoRARequest

POLICY_ADAPTER_ID = 2**20
"""Above those of adapters that users load, which vLLM counts from 1."""


def policy_adapter(directory: str | None = None) -> LoRARequest:
    """What names it to the engine.

    Args:
        directory: load its weights from there, in place of those it has.
    """
    return LoRARequest(
        lora_name="trivet-policy",
        lora_int_id=POLICY_ADAPTER_ID,
        lora_path=directory or "loaded already",
        load_inplace=directory is not None,
    )
