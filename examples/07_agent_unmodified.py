"""An agent program that isn't specific to AstraFlow: it calls OPENAI_BASE_URL and prints its answer.

Try it: astraflow try examples/07_agent_unmodified.yaml --task 1
"""

import json
import os
import sys

from openai import OpenAI

task = json.load(sys.stdin)
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
answer = client.chat.completions.create(
    model=os.environ.get("ASTRAFLOW_MODEL", "gpt-5"),
    messages=[{"role": "user", "content": task["prompt"]}],
)
print(answer.choices[0].message.content)
