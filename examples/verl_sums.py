"""Data and a reward in verl's format: a parquet file with its columns, and a `compute_score`.

Make the data: python examples/verl_sums.py
Try it:        astraflow try examples/verl_sums.yaml --task 1
"""

import sys
from typing import Any

__all__ = ["compute_score"]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
    """Returns the score, and as a metric whether there was an answer."""
    if data_source != "sums":
        raise ValueError(f"there is no score for {data_source!r}")
    _, equals, answer = solution_str.rpartition("=")
    return {"score": float(answer.strip() == ground_truth), "answered": float(bool(equals))}


def rows(num_rows: int) -> list[dict[str, Any]]:
    """Returns rows with verl's columns."""
    pairs = [(10 + idx % 90, 10 + 7 * idx % 90) for idx in range(num_rows)]
    return [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"Calculate {a} + {b}."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": "train", "index": idx},
        }
        for idx, (a, b) in enumerate(pairs)
    ]


if __name__ == "__main__":
    import datasets

    path = sys.argv[1] if len(sys.argv) > 1 else "verl_sums.parquet"
    datasets.Dataset.from_list(rows(512)).to_parquet(path)
