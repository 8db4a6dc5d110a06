"""Evaluation of a served model: held-out episodes, played over HTTP against the scripted tools."""
