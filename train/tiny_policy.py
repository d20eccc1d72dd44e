"""Make the tiny ticket-desk policy from nothing: tokenizer, weights, and a warm start by a scripted expert.

``python -m train.tiny_policy --out configs/models/tiny-tracker --seed 1``

The curriculum has three phases. First the expert's clean episodes *without* a system prompt, until copying (ids, names,
titles) works: with the prompt in front a network of this size never finds it. Then clean episodes with the prompt. Then
episodes in most of which the expert slips: the policy knows the work but has bad habits, which is what reinforcement
learning mends.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from actors.envs.local_fleet.apps.tracker import Tracker
from actors.envs.local_fleet.apps.tracker_expert import Attempt, episode
from actors.envs.local_fleet.apps.tracker_tasks import Problem, draw_problem, problems
from actors.prompt import Prompter, system_text
from actors.task import Task
from train.warm_start import Example, Imitator, encode_episode, imitate

EOS, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (PAD, "<|im_start|>", EOS)
TAGS = ("<tool_call>", "</tool_call>", "<done>")  # sampled text: must survive skip_special_tokens=True
CONTEXT = 1024  # token ids
MAX_TURN = 64  # token ids of one turn
SLIP_RATES = (0.75, 0.5)  # of episodes that change the desk, of episodes that report on it
# The answer is one token of an episode: at their natural share the kinds that turn on it are learnt last, or never.
DRILLED = (
    "owner", "report_status", "report_priority", "last_comment",
    "most_urgent", "count", "count_mine", "full_update",
)  # fmt: skip
DRILL_SHARE = 0.4

# One line per tool: a policy of this size cannot afford the tokens of JSON schemas.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% if loop.first and tools %}{{ '\\n\\n## Available Tools' }}{% for tool in tools %}"
    "{% set f = tool['function'] %}{% set p = f['parameters'] %}{{ '\\n' + f['name'] + '(' }}"
    "{% for name in p.get('properties', {}) %}{{ name if name in p.get('required', []) else name + '?' }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}{{ '): ' + f['description'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Ids, words, numbers and runs of punctuation are units of their own, so that each id, name and word is one token and
# copying it is one step.
_UNITS = Regex(r" ?T\d\d| ?[A-Za-z_]+| ?\d{1,4}| ?[^\sA-Za-z\d_]+|\s+")


def tool_schemas() -> list[dict[str, Any]]:
    """The tracker's tools in OpenAI function format."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
        }
        for tool in Tracker().tools
    ]


TOOLS = tool_schemas()


def opening_messages(problem: Problem) -> list[dict[str, Any]]:
    task = Task.model_validate(problem.task("draft"))
    return [
        {"role": "system", "content": system_text(task, TOOLS, "template")},
        {"role": "user", "content": problem.prompt},
    ]


# --------------------------------------------------------------------------------------------------- tokenizer


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the environment's own text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_UNITS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=2,
        show_progress=False,
        special_tokens=[*SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    core.train_from_iterator(_texts(seed), trainer)
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def _texts(seed: int) -> list[str]:
    rng = random.Random(f"tokenizer/{seed}")
    texts = ["\n".join(f"T{number}" for number in range(10, 34))] * 2
    signatures = "\n".join(f"{t['function']['name']}(): {t['function']['description']}" for t in TOOLS)
    for _ in range(600):
        problem = draw_problem(rng, "desk")
        messages = [*opening_messages(problem), *episode(problem)]
        # What the template or the call format wraps around is not part of the merges.
        for message in messages:
            text = message["content"]
            for tag in TAGS:
                text = text.replace(tag, "\n")
            texts.append(f"{message['role']}\n{text}")
    texts += [signatures] * 2
    texts += ["## Available Tools\n\n"] * 2
    names = [name for tool in TOOLS for name in tool["function"]["parameters"]["properties"]]
    texts += ["(" + "?, ".join(names) + "?):", "(" + ", ".join(names) + "):", "():"] * 2
    return texts


# ------------------------------------------------------------------------------------------------------- model


def build_model(vocab_size: int, eos_id: int, pad_id: int) -> Qwen3ForCausalLM:
    """A Qwen3 of about a million parameters. Seed torch before.

    The head starts as a copy of the embeddings (a residual stream that carries a token predicts it), and query norms
    start high (attention can be sharp from the first step): both help copying.
    """
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=384,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.07)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(1.5)
    return model


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    config = model.config
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# -------------------------------------------------------------------------------------------------- evaluation


@dataclass
class _Seat:
    attempt: Attempt
    ids: list[int]


@torch.no_grad()
def play(
    model: Qwen3ForCausalLM, prompter: Prompter, todo: list[Problem], temperature: float, seed: int, max_turns: int = 8
) -> tuple[list[bool], int]:
    """Let the model attempt problems in process, many at once. Returns which it solved and how many ids it sampled.

    Args:
        temperature: 0 is greedy.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    seats = [_Seat(Attempt(p), prompter.opening(opening_messages(p), TOOLS)) for p in todo]
    active, sampled = list(seats), 0
    for _ in range(max_turns):
        if not active:
            break
        turns = _sample_turn(model, [seat.ids for seat in active], prompter, temperature, generator)
        going_on = []
        for seat, turn in zip(active, turns, strict=True):
            sampled += len(turn)
            seat.ids += turn
            result = seat.attempt.turn(prompter.decode(turn))
            if result is not None and turn[-1] == prompter.tokenizer.eos_token_id:
                seat.ids += prompter.observation([result])
                going_on.append(seat)
        active = going_on
    solved = [seat.attempt.solved() for seat in seats]
    for seat in seats:
        seat.attempt.close()
    return solved, sampled


def _sample_turn(
    model: Any, prompts: list[list[int]], prompter: Prompter, temperature: float, generator: torch.Generator
) -> list[list[int]]:
    eos, pad = prompter.tokenizer.eos_token_id, prompter.tokenizer.pad_token_id
    length = max(map(len, prompts))
    ids = torch.tensor([[pad] * (length - len(p)) + p for p in prompts])
    attention = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    turns: list[list[int]] = [[] for _ in prompts]
    finished = torch.zeros(len(prompts), dtype=torch.bool)
    cache = DynamicCache(config=model.config)
    for _ in range(MAX_TURN):
        logits = model(
            input_ids=ids, attention_mask=attention, position_ids=positions, cache=cache, logits_to_keep=1
        ).logits[:, -1]
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)[:, 0]
        for turn, value, over in zip(turns, token.tolist(), finished.tolist(), strict=True):
            if not over:
                turn.append(value)
        finished |= token == eos
        if bool(finished.all()):
            break
        ids = token[:, None]
        attention = torch.cat([attention, torch.ones_like(ids)], 1)
        positions = positions[:, -1:] + 1
    return turns


def pass_rates(todo: list[Problem], solved: list[bool]) -> dict[str, float]:
    """pass@1 over all problems and per kind."""
    kinds: dict[str, list[bool]] = defaultdict(list)
    for problem, success in zip(todo, solved, strict=True):
        kinds["all"].append(success)
        kinds[problem.kind].append(success)
    return {kind: round(sum(values) / len(values), 3) for kind, values in kinds.items()}


# -------------------------------------------------------------------------------------------------- curriculum


@dataclass(frozen=True)
class Phase:
    """One part of the curriculum."""

    name: str
    steps: int
    lr_scale: tuple[float, float]
    system_prompt: bool = True
    slip_rates: tuple[float, float] = (0.0, 0.0)  # of episodes that change the desk, of episodes that report on it
    drill_share: float = DRILL_SHARE
    stop_below: float | None = None


CURRICULUM = (
    Phase("clean, no system prompt", 350, (1.0, 0.4), system_prompt=False, stop_below=0.004),
    Phase("clean", 100, (0.4, 0.1)),
    Phase("sloppy", 40, (0.2, 0.1), slip_rates=SLIP_RATES, drill_share=0.0),
)


def batch_drawer(prompter: Prompter, phase: Phase, size: int, seed: int) -> Callable[[], list[Example]]:
    """Fresh episodes without end."""
    rng = random.Random(f"{phase.name}/{seed}")

    def draw() -> list[Example]:
        batch = []
        while len(batch) < size:
            kind = rng.choice(DRILLED) if rng.random() < phase.drill_share else None
            problem = draw_problem(rng, "desk", kind)
            if not phase.system_prompt and problem.needs_context:
                continue
            rate = phase.slip_rates[problem.answer is not None]
            turns = episode(problem, slip=rng if rng.random() < rate else None)
            opening = opening_messages(problem)
            messages = [*(opening if phase.system_prompt else opening[1:]), *turns]
            batch.append(encode_episode(prompter, messages, TOOLS if phase.system_prompt else []))
        return batch

    return draw


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.tiny_policy", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, tokenizer and chat template")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; other numbers give other last digits")
    parser.add_argument("--batch-size", type=int, default=32, help="episodes a step")
    parser.add_argument("--max-steps", type=int, help="at most this many steps in each phase (for a quick look)")
    parser.add_argument("--eval-tasks", type=int, default=96, help="held-out problems to report on; 0: none")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    started = time.monotonic()

    tokenizer = build_tokenizer(options.seed)
    prompter = Prompter(tokenizer, "template")
    model = build_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    # Validation problems of their own: the shipped held-out tasks must not decide anything here.
    judged = [problem for _, problem in problems("heldout", options.eval_tasks, seed=options.seed + 1000)]
    imitator = Imitator(model, tokenizer.pad_token_id, lr=3e-3, muon_lr=0.01)
    for phase in CURRICULUM:
        losses: list[float] = []

        def report(step: int, loss: float, phase: Phase = phase, losses: list[float] = losses) -> None:
            losses.append(loss)
            if step % 10 == 0:
                print(f"{phase.name}, step {step}: loss {loss:.4f}, {time.monotonic() - started:.0f} s", flush=True)

        steps = min(phase.steps, options.max_steps or phase.steps)
        draw = batch_drawer(prompter, phase, options.batch_size, options.seed)
        taken = imitate(imitator, draw, steps, lr_scale=phase.lr_scale, stop_below=phase.stop_below, report=report)
        line: dict[str, Any] = {"phase": phase.name, "steps": taken, "first_loss": losses[0], "loss": losses[-1]}
        line["wall_s"] = round(time.monotonic() - started)
        if judged and phase.system_prompt:
            for label, temperature in (("greedy", 0.0), ("sampled", 1.0)):
                line[label] = pass_rates(judged, play(model, prompter, judged, temperature, options.seed)[0])
        print(json.dumps(line), flush=True)
    save(model, tokenizer, options.out)
    print(f"{options.out}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
