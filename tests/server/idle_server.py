"""A server process without a model: `python -m tests.server.idle_server`.

It does not import MindSpore, so its memory is that of connections and requests.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from glm_multiuser.cli import screen
from glm_multiuser.server.keys import read_keys
from glm_multiuser.server.logs import configure_logging
from glm_multiuser.server.run import listen, serve, url_of
from glm_multiuser.server.settings import ModelSettings, ServerSettings


def main() -> None:
    models = (ModelSettings("none", Path(), load=False),)
    listening = listen("127.0.0.1", 0)
    announce = partial(screen.notice, f"listening on {url_of(listening)}")
    configure_logging(as_json=True)
    asyncio.run(serve(ServerSettings(models, keys=read_keys(None).keys), listening, announce))


if __name__ == "__main__":
    main()
