"""Widths of tables, as the browser Chromium draws the pages of a site without a window."""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path

# Pages are drawn one after the other in a frame, whose width may be that of a phone, as a window's may not.
SCRIPT = """<!doctype html><meta charset="utf-8"><body><script>
async function measure(pages, width) {
  const wide = [];
  for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.style.width = width + "px";
    document.body.append(frame);
    await new Promise(done => { frame.onload = done; frame.src = page; });
    const drawn = frame.contentDocument;
    if (!drawn.querySelector("article")) wide.push(page + " is not drawn");
    for (const table of drawn.querySelectorAll("article table")) {
      const room = table.closest(".table-wrapper") || table.parentElement;
      const excess = table.getBoundingClientRect().width - room.clientWidth;
      if (room.clientWidth && excess > 1)
        wide.push(page + ": " + Math.ceil(excess) + " px, " + table.innerText.split("\\n")[0]);
    }
    if (drawn.documentElement.scrollWidth > width) wide.push(page + ": the page itself");
    frame.remove();
  }
  document.body.innerText = JSON.stringify(wide);
}
measure(PAGES, WIDTH);
</script></body>"""


def browser() -> str | None:
    """The program of a browser that draws pages without a window."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def too_wide(site: Path, pages: Iterable[str], width: int) -> list[str]:
    """The tables that are wider than their columns, and the pages that are wider than `width` px."""
    script = SCRIPT.replace("PAGES", json.dumps(list(pages))).replace("WIDTH", str(width)).encode()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *values: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path != "/measure":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(script)
            return None

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/measure"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=600000"]
        drawn = subprocess.run(
            [str(browser()), *options, "--dump-dom", address],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        server.shutdown()

    body = re.search(r"<body>(\[.*\])</body>", drawn.stdout, re.DOTALL)
    assert body is not None, drawn.stdout[-500:]
    tables: list[str] = json.loads(html.unescape(body[1]))
    return tables
