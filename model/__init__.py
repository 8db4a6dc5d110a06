"""Kimi K3 in SGLang: encoding, CPU platform, tiny checkpoint, reference model, launch profiles."""
