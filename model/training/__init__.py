"""Training of a small K3: its network with gradients, its data, its optimiser."""
