"""A reward of your own: `task.reward = "examples.own_reward:score"` in a run that starts in the checkout."""

from collections.abc import Mapping
from typing import Any


def score(response: str, row: Mapping[str, Any]) -> float:
    """Return 1 for the right last digit, less a hundredth for each character beyond those that the row asks for.

    response    text that the policy wrote, without the token that ended it
    row         the line of the file, as a mapping
    """
    right = response[-1:] == row["answer"]
    return float(right) - 0.01 * max(0, len(response) - row["characters"])


if __name__ == "__main__":
    row = {"prompt": "7+5+8=", "answer": "0", "characters": 11}
    for response in ("7+5=2,2+8=0", "7+5=2,2+8=1", "7+5=2,2+8=0,0+0=0"):
        print(f"{response:18} {score(response, row):5.2f}")

# Output:
# 7+5=2,2+8=0         1.00
# 7+5=2,2+8=1         0.00
# 7+5=2,2+8=0,0+0=0   0.94
