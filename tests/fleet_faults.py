"""What tests ask of a local Fleet beside its API: faults, and what it saw."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from actors.envs.fleet import close_clients
from actors.envs.local_fleet.process import LocalFleetProcess

KEY = "sk-test"


class LocalFleet:
    """A running local Fleet, for the tests of one module."""

    def __init__(self, process: LocalFleetProcess) -> None:
        self.url = process.url
        self._http = httpx.Client(base_url=process.url)

    def arm(self, *faults: dict[str, Any], seed: int = 0) -> None:
        """Replace all faults."""
        self._http.post("/_local/faults", json={"seed": seed, "faults": list(faults)}).raise_for_status()

    def struck(self) -> int:
        """How often the armed faults have struck."""
        return sum(fault["struck"] for fault in self._http.get("/_local/faults").json()["faults"])

    def stats(self) -> dict[str, Any]:
        return self._http.get("/_local/stats").json()

    def instances(self, run: str = "") -> list[dict[str, Any]]:
        """Every instance whose run id contains ``run``, ended ones included."""
        found = self._http.get("/_local/instances").json()
        return [instance for instance in found if run in (instance["run_id"] or "")]

    def running(self, run: str = "") -> list[str]:
        return [i["instance_id"] for i in self.instances(run) if i["status"] == "running"]

    def rows(self, instance: dict[str, Any], query: str) -> list[list[Any]]:
        """Rows of an instance's current database."""
        url = f"{instance['urls']['manager']['api']}/resources/sqlite/current/query"
        return self._http.post(url, json={"query": query, "read_only": True}).json()["rows"]


@asynccontextmanager
async def leaving_nothing(local_fleet: LocalFleet) -> AsyncIterator[None]:
    """Around one test: no faults before and after it, no instance and no connection of it left."""
    local_fleet.arm()
    yield
    local_fleet.arm()
    assert local_fleet.running() == [], "a test left instances behind"
    await close_clients()
