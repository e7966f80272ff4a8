"""Models: loads and exports Hugging Face folders, tokenizers, chat templates, adapters."""
