"""Models from GGUF files: `astraflow model convert`, and `astraflow model fetch` for a packaged one."""
