"""An episode whose turns a model behind a chat endpoint takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from actors.episode import DialogueRules, Environment, Episode, EpisodeLimits, PhaseFailed
from actors.task import Task
from actors.trajectory import Outcome, StopReason, Trajectory
from train.chat.dialogue import ChatDialogue
from train.chat.protocol import Overlong, Reply

if TYPE_CHECKING:
    from train.chat.endpoint import ChatEndpoint


class ChatEpisode(Episode):
    """An :class:`Episode` over messages in place of token ids; environment, rules, phases and outcomes are the same.

    Its trajectory holds no ids. ``limits.max_input_length`` goes by the tokens that the endpoint counted with its last
    turn; ``limits.max_model_len`` is the endpoint's own affair.
    """

    def __init__(
        self,
        task: Task,
        episode_id: str,
        *,
        group_id: int,
        sample_index: int,
        open_env: Callable[[], Awaitable[Environment]],
        endpoint: ChatEndpoint,
        limits: EpisodeLimits,
        rules: DialogueRules,
    ) -> None:
        super().__init__(
            task,
            episode_id,
            group_id=group_id,
            sample_index=sample_index,
            open_env=open_env,
            limits=limits,
            rules=rules,
        )
        self._endpoint = endpoint
        self._counted = 0  # tokens of the dialogue, by the last turn

    def not_begun(self, outcome: Outcome) -> Trajectory:
        """The trajectory of an episode that is never run."""
        return self._trajectory(outcome, 0.0)

    def _open(self, tools: list[dict[str, Any]], begun: str | None) -> None:
        self._chat = ChatDialogue(self._endpoint, self.task, tools, begun)
        self._messages = self._chat.record

    async def _turn(self) -> None:
        if self._counted > self._limits.max_input_length or (reply := await self._ask()) is None:
            self._stop = StopReason.LENGTH
            return
        self._counted = reply.prompt_tokens + reply.completion_tokens
        self._turns += 1
        turn = self._chat.take(reply)
        if reply.finish_reason == "length":
            self._stop = StopReason.LENGTH
            return
        if reply.finish_reason == "content_filter":
            raise PhaseFailed("generate: the endpoint ended the turn with 'content_filter'")
        texts = await self._act(turn)
        if self._stop is None and self._turns >= self._limits.max_turns:
            self._stop = StopReason.MAX_TURNS
        if self._stop is None:
            self._chat.answer(texts)

    async def _ask(self) -> Reply | None:
        """The next turn; ``None`` where the dialogue has outgrown the model's context."""
        deadlines = self._limits.deadlines
        # The endpoint keeps the deadline itself, and says what it waited for; the margin lets it do so.
        async with self._timed("generate", deadlines.generate + deadlines.close):
            try:
                return await self._chat.ask()
            except Overlong:
                return None
