"""Kimi K3's operators in plain torch, and the SGLang platform that serves with them on a CPU."""
