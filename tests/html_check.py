"""The pages, opened in headless Chromium: search, folding and links work, nothing is printed to the console, no network.

    python tests/html_check.py [--page FILE] [--shots FOLDER]

Chromium is driven over a pipe (its DevTools protocol), so nothing beside Debian's `chromium` is needed.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# the folder of this file holds one called graphopt, which is not the package
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
LIMIT_BYTES = 3 << 20


class Browser:
    """Headless Chromium over `--remote-debugging-pipe`: JSON messages that end in a NUL byte."""

    def __init__(self, size: tuple[int, int] = (1500, 1100)) -> None:
        found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if found is None:
            sys.exit("no Chromium: apt-get install chromium, or set CHROMIUM")
        self.home = tempfile.mkdtemp(prefix="graphopt-chromium-")
        to_child, self.write = os.pipe()
        self.read, from_child = os.pipe()

        def wire() -> None:
            os.dup2(os.dup(to_child), 3)
            os.dup2(os.dup(from_child), 4)

        # high numbers first, so that 3 and 4 are free to be replaced
        to_child, from_child = (os.dup2(fd, fd + 40) for fd in (to_child, from_child))
        command = [found, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                   "--remote-debugging-pipe", f"--user-data-dir={self.home}", f"--window-size={size[0]},{size[1]}", "about:blank"]
        self.process = subprocess.Popen(command, preexec_fn=wire, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_child)
        os.close(from_child)
        self.buffer, self.count, self.events = b"", 0, []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t for t in targets if t["type"] == "page")
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    session: str | None = None

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; events that arrive meanwhile are kept."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.next()
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            part = os.read(self.read, 1 << 16)
            if not part:
                raise RuntimeError("Chromium closed the pipe")
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path) -> float:
        """Load a page; seconds until its load event."""
        self.events.clear()
        start = time.perf_counter()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.next())
        return time.perf_counter() - start

    def js(self, code: str) -> Any:
        """The value of an expression (promises are awaited)."""
        done = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise AssertionError(f"{code}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def until(self, code: str, what: str, seconds: float = 20) -> None:
        """Wait for an expression to be true: pages answer typing after a pause."""
        end = time.monotonic() + seconds
        while not self.js(code):
            check(time.monotonic() < end, f"not within {seconds} s: {what}")
            time.sleep(0.05)
        print(f"  {what}")

    def complaints(self) -> list[str]:
        """Exceptions, console errors and requests to anything but the page itself."""
        self.js("1")  # so that pending events have arrived
        out = []
        for e in self.events:
            method, p = e.get("method"), e.get("params", {})
            if method == "Runtime.exceptionThrown":
                out.append(str(p["exceptionDetails"].get("exception", p["exceptionDetails"])))
            if method == "Runtime.consoleAPICalled" and p["type"] in ("error", "warning"):
                out.append(str(p["args"]))
            if method == "Log.entryAdded" and p["entry"]["level"] == "error":
                out.append(p["entry"]["text"])
            if method == "Network.requestWillBeSent" and not p["request"]["url"].startswith(("file:", "data:")):
                out.append(f"request to {p['request']['url']}")
        return out

    def shot(self, path: Path, full: bool = False) -> None:
        """A screenshot."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)
        shutil.rmtree(self.home, ignore_errors=True)


def wan_page(path: Path) -> Path:
    """40 Wan blocks of tiny width: the node count of Wan-14B, captured in seconds."""
    import torch
    from diffusers import WanTransformer3DModel

    import graphopt

    with torch.device("meta"):
        model = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
                                      text_dim=16, freq_dim=32, ffn_dim=32, num_layers=40, rope_max_seq_len=32)
        inputs = dict(hidden_states=torch.zeros(2, 4, 2, 16, 16), timestep=torch.ones(2, dtype=torch.int64),
                      encoder_hidden_states=torch.zeros(2, 7, 16), return_dict=False)
    graphopt.inspect(model, **inputs, title="Wan, 40 tiny blocks", options={"graphopt.select": "all"}).to_html(path)
    return path


def broken_page(path: Path) -> Path:
    """Two graphs, one site declined, one place left alone."""
    import torch
    import torch.nn.functional as F

    import graphopt

    class Broken(torch.nn.Module):
        def forward(self, x, s, b):
            y = F.layer_norm(x, (8,)) * (1 + s) + b
            torch._dynamo.graph_break()
            n = F.layer_norm(y, (8,)) * (1 + s)
            return n + b, n.relu()

    made = graphopt.inspect(Broken(), torch.ones(2, 20, 8), *(torch.ones(2, 1, 8, requires_grad=True) for _ in range(2)), title="<b>two</b> graphs & 'more'")
    made.to_html(path)
    return path


def check(condition: object, what: str) -> None:
    if not condition:
        raise AssertionError(what)
    print(f"  {what}")


def exercise(b: Browser, page: Path, blocks: int) -> None:
    """What a reader does with the page of a model with equal blocks."""
    size = page.stat().st_size
    check(size <= LIMIT_BYTES, f"{size} bytes")
    print(f"  opened in {b.open(page):.2f} s")
    check(b.js("[...document.querySelectorAll('#sites tbody.group')].length < 20"), "equal blocks share a line")
    check(b.js("getComputedStyle(document.querySelector('tr.member')).display === 'none'"), "members are folded")
    b.js("document.querySelector('#sites tr.folds').click()")
    shown = b.js("[...document.querySelector('#sites tr.folds').parentElement.querySelectorAll('tr.member')].filter(m => !m.hidden).length")
    check(shown >= blocks - 1, f"a click shows {shown} members")
    b.js("document.querySelector('#sites tr.folds').click()")
    check(b.js("[...document.querySelectorAll('#sites tr.member')].every(m => m.hidden)"), "another click folds them")

    b.js("{const s = document.getElementById('search'); s.value = 'blocks.7.norm3'; s.dispatchEvent(new Event('input'))}")
    b.until("[...document.querySelectorAll('#sites tbody.group')].filter(e => !e.hidden).length === 1", "search leaves one line of sites")
    check(b.js("[...document.querySelectorAll('#sites tr.member')].filter(e => !e.hidden && !e.parentElement.hidden).length") == 1, "and one member")
    check(b.js("document.querySelectorAll('#found .row').length") > 0, "and lists nodes of the graph")
    check("place" in b.js("document.getElementById('hits').textContent"), "and counts")
    b.js("document.querySelector('#sites tr.member:not([hidden]) a').click()")
    check(b.js("document.querySelectorAll('.row.lit').length") == 1, "a site links to its node")
    check(b.js("{const r = document.querySelector('.row.lit').getBoundingClientRect(); r.top >= 0 && r.bottom <= innerHeight}"), "which is scrolled into view")
    check(b.js("document.querySelector('.row.lit').title.includes('blocks.7')"), "in its own block")
    b.js("document.querySelector('.row.lit a')?.click()")
    check(b.js("document.querySelectorAll('.row.lit').length") == 1, "operands are links")
    b.js("{const s = document.getElementById('search'); s.value = ''; s.dispatchEvent(new Event('input'))}")
    b.until("[...document.querySelectorAll('[data-search]')].every(e => !e.hidden)", "an empty search shows everything")

    b.js("document.querySelector('#sites .files a').click()")
    check(b.js("decodeURIComponent(location.hash).startsWith('#kernel/') && document.getElementById(decodeURIComponent(location.hash.slice(1))).open"), "a site links to its kernel's source")
    check(b.js("document.querySelector('details.source[open] pre').textContent.includes('@triton.jit')"), "which is there")
    b.js("document.querySelector('.change .came a').click()")
    check(b.js("document.querySelector('.row.lit').classList.contains('fused')"), "a change links to the call it put in")
    b.js("{const s = document.getElementById('stage'); s.value = 'before'; s.dispatchEvent(new Event('change'))}")
    check(b.js("document.querySelectorAll('.row.fused').length") == 0, "the stage before has no fused call")
    b.js("document.getElementById('open').click()")
    b.until("document.querySelectorAll('#nodes .row').length > 100", "all blocks open")
    b.js("{const p = document.querySelector('#nodes select'); p.selectedIndex = 5; p.dispatchEvent(new Event('change'))}")
    check(b.js("document.querySelector('#nodes select').closest('details').querySelector('.row').title").startswith("blocks.5"), "another block of a run can be picked")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="only open this page, and take screenshots")
    parser.add_argument("--shots", type=Path, help="folder for screenshots")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shots = args.shots or Path(folder)
        shots.mkdir(parents=True, exist_ok=True)
        pages = [] if args.page else [wan_page(Path(folder) / "wan.html"), broken_page(Path(folder) / "broken.html")]
        b = Browser()
        try:
            if args.page:
                print(f"{args.page}: opened in {b.open(args.page):.2f} s, {args.page.stat().st_size} bytes")
                b.shot(shots / "page.png", full=True)
            else:
                print("a model of 40 blocks")
                exercise(b, pages[0], 40)
                b.shot(shots / "wan.png")
                check(not b.complaints(), f"nothing on the console, no request {b.complaints()}")
                print("two graphs, names with markup")
                b.open(pages[1])
                check(b.js("document.querySelector('h1').textContent").startswith("<b>two</b> graphs"), "markup in names is text")
                check(b.js("document.querySelectorAll('#which option').length") == 2, "both graphs can be chosen")
                check("graph break" in b.js("document.querySelector('.note').textContent"), "the break is named on top")
                b.js("{const s = document.getElementById('which'); s.value = '1'; s.dispatchEvent(new Event('change'))}")
                check(b.js("document.getElementById('nodes').childElementCount") > 0, "the second one is drawn")
                b.shot(shots / "broken.png", full=True)
            check(not b.complaints(), f"nothing on the console, no request {b.complaints()}")
        finally:
            b.close()
    print("html: all well")


if __name__ == "__main__":
    main()
