"""The scraper reads the metrics as often as it is told."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from benchmarks.parts.scraper import start_scraper


def test_it_reads_and_says_how_long_that_took() -> None:
    read: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            read.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        with start_scraper(f"http://127.0.0.1:{server.server_port}") as reader:
            taken = reader.ask("scrape", 0.1, 0.001)
        server.shutdown()
        serving.join()
    assert len(taken) == len(read) > 0
    assert set(read) == {"/metrics"}
    assert min(taken) > 0
