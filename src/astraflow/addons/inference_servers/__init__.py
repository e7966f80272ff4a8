"""Engines whose model runs in a server: vLLM and SGLang, and OpenAI-compatible endpoints for evaluation."""
