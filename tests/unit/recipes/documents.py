"""Forty-six elastic recipes of the kind that HyperPod's collection holds: its families, methods, sizes and batches, in our words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Recipes by family. The collection has as many, half of them for supervised fine-tuning with LoRA and half for DPO.
FAMILIES = {"deepseek": 12, "gpt_oss": 4, "llama": 10, "qwen": 20}
SIZES = ((1, 2, 4, 8, 16), (1, 2, 4, 6, 8, 16), (1, 2, 3, 4, 6, 8, 16))
LEARNING_RATES = {"sft_lora": 4e-4, "dpo": 2.828e-4}
GRACE_S = (600, 900, 1200)
RANKS_PER_NODE = 8
GLOBAL_BATCH = 128
# Sizes at which 128 samples do not divide by the ranks: number of small parts, small part, large part.
UNEVEN = {3: (16, 5, 6), 6: (16, 2, 3)}


def recipe(family: str, number: int, sizes: tuple[int, ...], method: str, grace_s: int) -> dict[str, Any]:
    """Give one recipe, as it is after Hydra has merged the files that it names."""
    return {
        "run": {"name": f"{family}_{number}b_{method}", "results_dir": f"/data/results/{family}-{number}"},
        "trainer": {"devices": RANKS_PER_NODE, "num_nodes": 1},
        "training_config": {
            "model_config": {"model_name_or_path": f"example/{family}-{number}b"},
            "training_args": {
                "train_batch_size": GLOBAL_BATCH,
                "micro_train_batch_size": 1,
                "learning_rate": 1e-4,
                "max_len": 4096,
                "override_training_dir": True,
            },
        },
        "elastic_policy": {
            "is_elastic": False,
            "min_nodes": 1,
            "max_nodes": 16,
            "use_graceful_shutdown": True,
            "scaling_timeout": 600,
            "graceful_shutdown_timeout": grace_s,
        },
        "scale_config": {nodes: scale(nodes, LEARNING_RATES[method]) for nodes in sizes},
    }


def scale(nodes: int, learning_rate: float) -> dict[str, Any]:
    """Give the block of one size: a micro-batch of its own, or uneven parts."""
    arguments: dict[str, Any] = {"train_batch_size": GLOBAL_BATCH, "learning_rate": learning_rate}
    if nodes in UNEVEN:
        num_small, small, large = UNEVEN[nodes]
        arguments["uneven_batch"] = {
            "use_uneven_batch": True,
            "num_dp_groups_with_small_batch_size": num_small,
            "small_local_batch_size": small,
            "large_local_batch_size": large,
        }
    elif nodes < 16:
        arguments["micro_train_batch_size"] = min(8, GLOBAL_BATCH // (nodes * RANKS_PER_NODE))
    return {"trainer": {"num_nodes": nodes}, "training_config": {"training_args": arguments}}


def all_recipes() -> Iterator[tuple[str, dict[str, Any], tuple[int, ...]]]:
    """Give name, recipe and sizes of each."""
    count = 0
    for family, several in FAMILIES.items():
        for number in range(several):
            method = ("sft_lora", "dpo")[number % 2]
            sizes = SIZES[count % len(SIZES)]
            found = recipe(family, number, sizes, method, GRACE_S[count % len(GRACE_S)])
            yield found["run"]["name"], found, sizes
            count += 1
