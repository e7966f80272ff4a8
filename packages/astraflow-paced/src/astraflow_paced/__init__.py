"""Emulated GPUs: the engine, backend and workflow `paced`."""
