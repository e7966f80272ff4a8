"""Data sets: those of Hugging Face, and known ones, prepared once and then read from a folder."""
