"""Downloads models from the Hugging Face Hub."""
