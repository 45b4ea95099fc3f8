"""Figures as `qtool eval` gives them, made up."""

from typing import Any


def figures(artifact: str, size: int, mean: float, **more: Any) -> dict[str, Any]:
    """What `qtool eval --json` says."""
    return {
        "artifact": artifact,
        "size_bytes": size,
        "perplexity": 20.0,
        "perplexity_interval": [19.0, 21.0],
        "reference_perplexity": 19.5,
        "kld": {"mean": mean, "median": mean, "p99": mean, "max": mean, "interval": [mean, mean]},
        "top1_agreement": 0.9,
        "rms_dp": 0.01,
        "acceptance": 0.95,
        "tokens": 96,
        "protocol": {"name": "plain", "text": "text.txt", "windows": 2, "length": 48},
        "failed": [],
    } | more
