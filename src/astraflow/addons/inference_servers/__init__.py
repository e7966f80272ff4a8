"""Engines whose model runs in a server of its own: vLLM and SGLang."""
