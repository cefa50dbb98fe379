"""Configurations of losses of papers and peers, with bounds that the small samples of tests reach."""

from typing import Any

LOSSES_OF_PEERS: dict[str, dict[str, Any]] = {
    "luspo": {"type": "luspo", "clip_low": 0.3, "clip_high": 0.4},
    "gmpo": {"type": "gmpo"},
    "sapo": {"type": "sapo"},
    "vespo": {"type": "vespo"},
    "clip_cov": {"type": "clip_cov", "cov_ratio": 0.2, "cov_low": 0.0},
    "kl_cov": {"type": "kl_cov", "cov_ratio": 0.2},
    "decoupled": {"type": "decoupled", "normalization": "sample"},
}
