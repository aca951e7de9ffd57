"""From a prompt to text: generation from a trained model."""
