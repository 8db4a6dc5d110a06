"""Kimi K3 in SGLang: encoding, CPU platform, tiny and small checkpoints, reference model, launch profiles."""
