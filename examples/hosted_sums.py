"""An environment that runs in a separate Python and imports nothing from AstraFlow.

It asks the policy over HTTP and returns the reward.

Try it: astraflow try examples/hosted_sums.yaml --task 1
"""

import json
import random
import urllib.request


class Sums:
    """Sums of two numbers."""

    version = "1.0"

    def __init__(self, size=2000, largest=99):
        self.size = size
        self.largest = largest

    def tasks(self, split):
        dice = random.Random(f"sums {split}")
        for number in range(self.size):
            a, b = dice.randint(0, self.largest), dice.randint(0, self.largest)
            yield {
                "id": f"{split}-{number}",
                "prompt": f"Calculate {a} + {b}.",  # shown to people who look at tasks
                "data": {"a": a, "b": b},  # passed to `run`, on this machine or another one
            }

    def run(self, data, episode):
        text = ask(episode, "agent", f"Calculate {data['a']} + {data['b']}.")
        right = text.rpartition("=")[2].strip() == str(data["a"] + data["b"])
        return {"parts": [{"role": "agent", "reward": float(right)}], "score": float(right)}


def ask(episode, role, prompt):
    body = {"model": episode.models[role], "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        f"{episode.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {episode.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
