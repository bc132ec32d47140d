"""What a model's cached tokens take, and what a machine can hold of them, before anything runs."""
