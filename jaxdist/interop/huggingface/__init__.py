"""Hugging Face folders: read and written, and the tables of their families."""
