"""Emulated GPUs: the engine, backend and workflow `paced`, and the command `astraflow plan`."""
