"""What Kimi K3 takes of a node: weights, KV, states, tiers."""
