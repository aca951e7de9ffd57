"""The device's side of the engine: programs of a few shapes, their pages, what they give."""
