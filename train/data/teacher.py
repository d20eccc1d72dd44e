"""What decides how a teacher does at a task."""

from __future__ import annotations

from train.chat.protocol import EndpointSettings


class TeacherSettings(EndpointSettings):
    """A model behind an endpoint, and the limits of its attempts.

    Attributes:
        max_input_tokens: an attempt with a longer dialogue takes no further turn; needs an endpoint that counts.
        max_output_chars: of the tool results that follow one turn.
    """

    max_turns: int = 50
    max_input_tokens: int = 48_000
    max_output_chars: int = 20_000
