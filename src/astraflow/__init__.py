"""AstraFlow: reinforcement learning of LLM agents as a dataflow between autonomous services."""

__all__ = ["__version__"]

__version__ = "0.1.0"
