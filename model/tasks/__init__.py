"""Scripted agent tasks: tools that answer from a drawn world, requests about it, and how each is solved."""
