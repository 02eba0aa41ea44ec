"""A debugger's side of the Debug Adapter Protocol, as far as stopping at a line and going on."""

from __future__ import annotations

import json
import socket
from typing import Any


def stops_at(port: int, path: str, line: int) -> list[str]:
    """Attaches to a program that listens, and returns the function of each stop at a line until the program ends."""
    stops: list[str] = []
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection, connection.makefile("rb") as replies:

        def send(command: str, **arguments: Any) -> None:
            request = {"seq": 1, "type": "request", "command": command, "arguments": arguments}
            body = json.dumps(request).encode()
            connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

        def receive() -> dict[str, Any]:
            size = 0
            while header := replies.readline().strip():
                size = int(header.rpartition(b":")[2])
            message: dict[str, Any] = json.loads(replies.read(size))
            assert message.get("success", True), message
            return message

        send("initialize", adapterID="test", linesStartAt1=True, pathFormat="path")
        send("attach", justMyCode=False)
        while (message := receive()).get("event") != "terminated":
            body = message.get("body", {})
            if message.get("event") == "initialized":
                send("setBreakpoints", source={"path": path}, breakpoints=[{"line": line}])
                send("configurationDone")
            elif message.get("event") == "stopped":
                stopped = body["threadId"]
                send("stackTrace", threadId=stopped)
            elif message.get("command") == "stackTrace":
                stops.append(body["stackFrames"][0]["name"])
                send("continue", threadId=stopped)
    return stops
