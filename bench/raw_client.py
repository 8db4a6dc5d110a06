"""A client of HTTP/1.1 that costs next to nothing: what is measured with it is the server."""

import asyncio
import time
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

import orjson


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. Times are seconds from the first byte sent: to the first of the body, and to the last."""

    status: int
    headers: dict[str, str]
    body: bytes
    first_s: float
    whole_s: float


class RawClient:
    """One kept-alive connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, key: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host
        self._key = key

    @classmethod
    async def connect(cls, url: str, key: str = "none") -> Self:
        """Connect to the host and port of a URL; `key` is sent with every request."""
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
        return cls(reader, writer, parts.netloc, key)

    async def post(self, path: str, document: object) -> Answer:
        """POST a JSON document. Raises OSError and `asyncio.IncompleteReadError` for a broken connection."""
        return await self.post_bytes(path, orjson.dumps(document))

    async def post_bytes(self, path: str, body: bytes) -> Answer:
        """POST a JSON text."""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self._key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        started_at = time.perf_counter()
        self._writer.write(head.encode() + body)
        raw = await self._reader.readuntil(b"\r\n\r\n")
        status, *lines = raw.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        received = bytearray()
        first_s = 0.0
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await self._reader.readline(), 16):
                received += await self._reader.readexactly(size)
                first_s = first_s or time.perf_counter() - started_at
                await self._reader.readexactly(2)
            await self._reader.readexactly(2)
        else:
            received += await self._reader.readexactly(int(headers["content-length"]))
            first_s = time.perf_counter() - started_at
        whole_s = time.perf_counter() - started_at
        return Answer(int(status.split(" ")[1]), headers, bytes(received), first_s, whole_s)

    async def close(self) -> None:
        """Give the connection back."""
        self._writer.close()
