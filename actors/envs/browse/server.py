"""The browsing environment: search and read an invented encyclopedia, then answer a question about it."""

from __future__ import annotations

from typing import Any

from fastmcp import FastMCP
from fastmcp.exceptions import ToolError
from openenv.core.env_server import Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

from actors.envs.browse.corpus import Index, index_of
from actors.envs.browse.questions import mark


class BrowseEnvironment(MCPEnvironment):
    """One question. The answer that is submitted ends the episode; its reward is 1 for the right one, else 0."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("browse")
        mcp.tool(self._search, name="search")
        mcp.tool(self._open, name="open")
        mcp.tool(self._answer, name="answer")
        super().__init__(mcp)
        self._state = State()
        self._index: Index | None = None
        self._expected = ""
        self._submitted: str | None = None

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, *, corpus: int, answer: str, **_: Any
    ) -> Observation:
        """Start a question.

        Args:
            corpus: number of the encyclopedia.
            answer: what the answer is compared with.
        """
        self._index = index_of(corpus)
        self._expected, self._submitted = answer, None
        self._state = State(episode_id=episode_id)
        return Observation()

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._graded(action, await super().step_async(action, timeout_s, **kwargs))

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._graded(action, super().step(action, timeout_s, **kwargs))

    @property
    def state(self) -> State:
        return self._state

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError(f"the actions are list_tools and call_tool, not {type(action).__name__}")

    def _graded(self, action: Any, observation: Observation) -> Observation:
        if isinstance(action, CallToolAction):
            self._state.step_count += 1
        if self._submitted is not None:
            observation.done, observation.reward = True, mark(self._submitted, self._expected)
        return observation

    def _pages(self) -> Index:
        if self._index is None:
            raise ToolError("reset comes first")
        return self._index

    def _search(self, query: str) -> str:
        """Find pages by words. Gives page ids, titles and extracts."""
        found = self._pages().search(query)
        return "\n".join(f"{page_id} {title}: {snippet}" for page_id, title, snippet in found) or "no page found"

    def _open(self, page_id: str) -> str:
        """Read a page, for example P123."""
        text = self._pages().page(page_id)
        if text is None:
            raise ToolError(f"there is no page '{page_id}'; search gives page ids")
        return text

    def _answer(self, text: str) -> str:
        """Submit the answer. This ends the task."""
        if self._submitted is None:
            self._submitted = text
        return "submitted"


def make_app(max_sessions: int) -> Any:
    """The OpenEnv server's ASGI application, for at most this many sessions at once."""
    return create_app(
        BrowseEnvironment, CallToolAction, CallToolObservation, env_name="browse", max_concurrent_envs=max_sessions
    )
