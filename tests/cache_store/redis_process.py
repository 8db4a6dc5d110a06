"""The server that the tests may kill, stop and starve."""

from bench.redis_process import RedisProcess

__all__ = ["RedisProcess"]
