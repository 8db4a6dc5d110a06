"""Names under which SGLang knows the platform and its attention backend."""

PLATFORM_NAME = "longhaul_cpu"
BACKEND_NAME = "longhaul_cpu"
