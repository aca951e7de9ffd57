"""GGUF files: read, checked, written, and the tables of their architectures."""
