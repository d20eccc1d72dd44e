"""Warm start: supervised imitation of a teacher's episodes.

Any teacher will do: a scripted expert, another model behind an API, the served policy's own successes. An episode is
``{"messages": [system, user, assistant, tool, assistant, ...], "tools": [...]}``; its token ids are built exactly as a
rollout builds them (:class:`actors.prompt.Prompter`), so that what is learnt here is what the policy meets there. The
loss is taken on the assistant's tokens only, the end-of-sequence token of each turn included.

``python -m train.warm_start --model DIR --episodes FILE.jsonl --out DIR``
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.prompt import Prompter


class EpisodeError(ValueError):
    """An episode that cannot be learnt from. The message says which and why."""


@dataclass(frozen=True)
class Example:
    """One episode as token ids. ``mask`` is 1 on the tokens to be learnt."""

    ids: list[int]
    mask: list[int]


def encode_episode(prompter: Prompter, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Example:
    """Token ids and mask of an episode, equal to those a rollout with the same turns would have.

    Raises:
        EpisodeError: no assistant turn, no message before the first one, or messages after the last one.
    """
    runs = [(turn, list(run)) for turn, run in groupby(messages, key=lambda m: m["role"] == "assistant")]
    if not runs or runs[0][0] or not runs[-1][0]:
        raise EpisodeError("an episode must begin with a system or user message and end with an assistant turn")
    ids = prompter.opening(runs[0][1], tools)
    mask = [0] * len(ids)
    for is_turn, run in runs[1:]:
        if is_turn and len(run) > 1:
            raise EpisodeError("two assistant turns follow one another")
        new = _turn_ids(prompter, run[0]) if is_turn else prompter.observation(run)
        ids += new
        mask += [int(is_turn)] * len(new)
    return Example(ids, mask)


def _turn_ids(prompter: Prompter, message: dict[str, Any]) -> list[int]:
    return [*prompter.encode(message["content"]), prompter.tokenizer.eos_token_id]


def load_episodes(path: Path) -> list[dict[str, Any]]:
    """Read episodes from JSON lines or a JSON list. Each needs ``messages``; ``tools`` may be missing.

    Raises:
        EpisodeError: naming the file and the line or index.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise EpisodeError(f"episode file {path} cannot be read: {error}") from None
    try:
        if text.lstrip().startswith("["):
            episodes = json.loads(text)
        else:
            episodes = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise EpisodeError(f"episode file {path} is not valid JSON: {error}") from None
    for index, episode in enumerate(episodes):
        messages = episode.get("messages") if isinstance(episode, dict) else None
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        ):
            raise EpisodeError(f"{path}, episode {index}: 'messages' must be a list of {{role, content}} with text")
    if not episodes:
        raise EpisodeError(f"episode file {path} holds no episodes")
    return episodes


class Imitator:
    """Cross-entropy on the masked tokens, mean over all of a batch's.

    Hidden matrices are trained by Muon where ``muon_lr`` is given, everything else by AdamW: at this size Muon learns
    to copy in half the steps. Without ``muon_lr`` AdamW trains all.
    """

    def __init__(self, model: Any, pad_id: int, lr: float, muon_lr: float | None = None):
        self.model = model
        self.pad_id = pad_id
        hidden, rest = [], []
        for name, parameter in model.named_parameters():
            matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (hidden if matrix and muon_lr is not None else rest).append(parameter)
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        ]
        if muon_lr is not None:
            muon = torch.optim.Muon(hidden, lr=muon_lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            self.optimizers.append(muon)
        self._full_lr = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, examples: list[Example], lr_scale: float = 1.0) -> float:
        """One optimiser step on a batch. Returns its loss before the step."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, full in zip(groups, self._full_lr, strict=True):
            group["lr"] = full * lr_scale
        loss = self.loss(examples)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def loss(self, examples: list[Example]) -> torch.Tensor:
        length = max(len(example.ids) for example in examples)
        ids = torch.full((len(examples), length), self.pad_id, dtype=torch.long)
        mask = torch.zeros((len(examples), length), dtype=torch.bool)
        for row, example in enumerate(examples):
            ids[row, : len(example.ids)] = torch.tensor(example.ids)
            mask[row, : len(example.mask)] = torch.tensor(example.mask, dtype=torch.bool)
        device = next(self.model.parameters()).device
        ids, mask = ids.to(device), mask.to(device)
        # Padding stands on the right, so causal attention alone keeps it out; no attention mask, no slow kernel.
        hidden = self.model.model(input_ids=ids).last_hidden_state[:, :-1]
        learnt = mask[:, 1:]
        # The head is the dearest layer: only where there is something to learn.
        logits = self.model.lm_head(hidden[learnt]).float()
        return torch.nn.functional.cross_entropy(logits, ids[:, 1:][learnt])


def imitate(
    imitator: Imitator,
    draw_batch: Callable[[], list[Example]],
    steps: int,
    *,
    lr_scale: tuple[float, float] = (1.0, 1.0),
    stop_below: float | None = None,
    report: Callable[[int, float], None] | None = None,
) -> int:
    """Train for at most ``steps`` batches, the learning rate going linearly between the two scales.

    Args:
        stop_below: end once the running mean of the loss (memory of about 10 steps) is below this.
        report: called after each step with its number (from 1) and the running mean.

    Returns:
        the number of steps taken.
    """
    imitator.model.train()
    mean = None
    for step in range(1, steps + 1):
        fraction = (step - 1) / max(steps - 1, 1)
        loss = imitator.step(draw_batch(), lr_scale[0] + (lr_scale[1] - lr_scale[0]) * fraction)
        mean = loss if mean is None else 0.9 * mean + 0.1 * loss
        if report is not None:
            report(step, mean)
        if stop_below is not None and mean < stop_below:
            return step
    return steps


def shuffled_batches(examples: list[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Batches without end: each pass over the examples in a new order, the last batch of a pass may be smaller."""
    while True:
        order = rng.sample(examples, len(examples))
        for start in range(0, len(order), size):
            yield order[start : start + size]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.warm_start", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder or name of the model to start from")
    parser.add_argument("--episodes", type=Path, required=True, help="the teacher's episodes, JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model and its tokenizer")
    parser.add_argument("--tools-channel", choices=("text", "template"), default="text")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--max-length", type=int, default=4096, help="longer episodes are left out")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    try:
        episodes = load_episodes(options.episodes)
        torch.manual_seed(options.seed)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        prompter = Prompter(tokenizer, options.tools_channel)
        examples = [encode_episode(prompter, e["messages"], e.get("tools") or []) for e in episodes]
    except (EpisodeError, OSError) as error:
        parser.error(str(error))
    kept = [example for example in examples if len(example.ids) <= options.max_length]
    print(f"{len(kept)} episodes, {len(examples) - len(kept)} left out as longer than {options.max_length} tokens")
    if not kept:
        parser.error("no episode is short enough; raise --max-length")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    batches = shuffled_batches(kept, options.batch_size, random.Random(options.seed))
    imitate(
        Imitator(model, pad_id, lr=options.lr),
        lambda: next(batches),
        options.steps,
        lr_scale=(1.0, 0.1),
        report=lambda step, loss: print(f"step {step}: loss {loss:.4f}", flush=True),
    )
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
