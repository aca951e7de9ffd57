"""From logits to tokens: by which parameters, and the program that draws."""
