"""Replay of agent traces against an HTTP endpoint."""
