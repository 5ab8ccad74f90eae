"""compose.yaml, with the defaults in the place of variables."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.deploy.dockerfile import ROOT

COMPOSE = ROOT / "compose.yaml"
SERVER = "glm-multiuser"


def read() -> dict[str, Any]:
    """As it is without any variable set."""
    text = COMPOSE.read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    return found


def services() -> dict[str, Any]:
    found: dict[str, Any] = read()["services"]
    return found
