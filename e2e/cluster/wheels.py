"""Lends a folder of wheels to an image build, as a page on loopback: a build sees no folder outside its context.

Usage: wheels.py FOLDER URL_FILE. Writes its address to URL_FILE and serves until it is ended. The port is the same each
time where it is free, since a build's cached layers are keyed by their arguments.
"""

import functools
import http.server
import sys
from pathlib import Path

PORT = 38437


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Its requests would bury the build's own words in the log."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


def server(folder: str) -> http.server.ThreadingHTTPServer:
    """A server of `folder` on loopback, at PORT or wherever there is room."""
    handler = functools.partial(Quiet, directory=folder)
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", PORT), handler)
    except OSError:
        return http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)


if __name__ == "__main__":
    with server(sys.argv[1]) as lent:
        part = Path(sys.argv[2] + ".part")
        part.write_text(f"http://127.0.0.1:{lent.server_port}/\n")
        part.rename(sys.argv[2])
        lent.serve_forever()
