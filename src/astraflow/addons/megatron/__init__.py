"""Megatron as a training backend: `train.backend: {name: megatron}`, over megatron-core."""
