"""What the host says about the next tokens of a request: guesses, and which are allowed."""
