"""How models write calls of tools: one module for each dialect."""
