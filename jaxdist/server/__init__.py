"""OpenAI's HTTP interface in front of the engine, and a page to try it."""
