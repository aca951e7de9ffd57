"""What a run will take, told before it runs."""
