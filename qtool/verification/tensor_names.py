"""Names of tensors that are told apart by name alone."""

import re

# Keys of config.json: how many layers are of multi-token prediction.
MTP_SETTINGS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
BUFFERS = ("inv_freq", "masked_bias", "position_ids", "causal_mask", ".attention.bias")
# Scales and zeros of attention, which belong to no matrix.
_ATTENTION = re.compile(r".*\.(?:[qkv](?:_proj)?[._](?:\w+_)?(?:scale|zero_point)|kv_scale|sinks)")
_PARTS = (
    "qweight", "qzeros", "scales", "scaled_zeros", "g_idx", "weight_packed", "weight_scale",
    "weight_scale_2", "weight_scale_inv", "weight_zero_point", "weight_global_scale",
    "weight_shape", "weight_g_idx", "SCB", "weight_format",
)  # fmt: skip


def of_attention(name: str) -> bool:
    """Whether a tensor is a scale or a zero of the cache, or a sink."""
    return _ATTENTION.fullmatch(name) is not None


def packed_part(name: str) -> str | None:
    """The module whose packed matrix a stored tensor is a part of.

    AutoAWQ also stores `act.scales`, which divide what an activation gives.
    """
    module, _, last = name.rpartition(".")
    return module if last in _PARTS and not module.endswith(".act") else None
