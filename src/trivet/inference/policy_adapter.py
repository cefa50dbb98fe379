"""Names the adapter that makes the policy out of the start model. Every request for the policy uses it, from version 0 on.

So a completion needs no change when a new policy is loaded in the middle of it: the adapter that it uses has new weights. Before
the first policy these are zeros.
"""

from trivet.inference.vllm_names import LoRARequest

POLICY_ADAPTER_ID = 2**20
"""Above the ids of adapters that users load, which vLLM counts from 1."""


def policy_adapter(directory: str | None = None) -> LoRARequest:
    """Return the LoRARequest under which vLLM knows the policy's adapter.

    Args:
        directory: replace its weights by those in this directory; None keeps them.
    """
    return LoRARequest(
        lora_name="trivet-policy",
        lora_int_id=POLICY_ADAPTER_ID,
        lora_path=directory or "loaded already",
        load_inplace=directory is not None,
    )
