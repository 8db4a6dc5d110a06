"""SGLang platform plug-in with which Kimi K3 runs on a plain CPU, in torch."""
