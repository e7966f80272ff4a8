"""A tool: the model looks names up until it can answer. Most questions need a second look at what was found.

Its model comes from: astraflow model init recipes/models/search.yaml --out models/search
Try it: astraflow try examples/03_tools.yaml --task 1
Train with it: astraflow run examples/03_tools.yaml
"""

from recipes.search.facts_world import documents

from astraflow.workflows.calls import ToolCall

__all__ = ["calls_in", "look_up"]

FACTS = {document["title"]: document["text"] for document in documents()}


def look_up(name: str) -> str:
    """Returns the fact about a person or a town. The model sees this docstring and the annotations."""
    return FACTS.get(name, "")


def calls_in(text: str) -> list[ToolCall]:
    """Reads the calls of this tiny model, such as `find robeka`. Large models need no parser of their own."""
    verb, _, name = text.partition(" ")
    return [ToolCall("look_up", {"name": name})] if verb == "find" else []
