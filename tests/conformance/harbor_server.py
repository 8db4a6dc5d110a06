"""An MCP server with one tool, `get_harbor`, which coding agents start from their configuration.

    python harbor_server.py CALLS

Every call is appended to the file `CALLS`, one JSON object a line: that is what a test knows of what an agent
executed. The tool is declared, and answers, in the manner of what the small K3 was trained on
(`model/tasks/lookups.py`), being busy included. Runs in the clients' environment (requirements.txt).
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool

HARBORS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("harbors.json").read_text("utf-8"))
BUSY = "Bergen"
"""The harbor that answers only when it is asked for a second time."""
TOOL = Tool(
    name="get_harbor",
    description="Look up a harbor: temperature, depth.",
    input_schema={
        "type": "object",
        "properties": {"name": {"type": "string", "description": "which harbor"}},
        "required": ["name"],
    },
)


async def list_tools(_context: Any, _params: Any) -> ListToolsResult:
    """Declare the tool."""
    return ListToolsResult(tools=[TOOL])


async def call_tool(_context: Any, params: CallToolRequestParams) -> CallToolResult:
    """Answer for one harbor, and write down what was asked."""
    calls = Path(sys.argv[1])
    name = str((params.arguments or {}).get("name"))
    known = [json.loads(line)["name"] for line in calls.read_text("utf-8").splitlines()]
    if params.name != TOOL.name or name not in HARBORS:
        text = f"error: no harbor named {name}"
    elif name == BUSY and name not in known:
        text = f"error: {TOOL.name} is busy, try again"
    else:
        text = json.dumps(HARBORS[name])
    with calls.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"tool": params.name, "name": name, "result": text}) + "\n")
    return CallToolResult(content=[TextContent(text=text)], is_error=text.startswith("error"))


async def main() -> None:
    """Serve until standard input ends."""
    server = Server("harbor", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
