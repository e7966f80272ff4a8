"""LoRA: policies train adapters of a base model, which is published and served once for all of them."""
