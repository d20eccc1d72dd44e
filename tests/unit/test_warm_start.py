"""The warm start learns any teacher's episodes, on exactly the ids a rollout has; the shipped tiny policy is sound."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.envs.local_fleet.apps.tracker_expert import episode
from actors.envs.local_fleet.apps.tracker_tasks import draw_problem, problems
from actors.prompt import Prompter
from actors.task import load_tasks
from train import tiny_policy, warm_start
from train.tiny_policy import TOOLS, opening_messages, play
from train.warm_start import EpisodeError, Example, Imitator, encode_episode, load_episodes

SHIPPED = Path("configs/models/tiny-tracker")


@pytest.fixture(scope="module")
def prompter():
    return Prompter(AutoTokenizer.from_pretrained(SHIPPED), "template")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)


def clean_episode(seed=0, kind=None):
    problem = draw_problem(random.Random(seed), "desk", kind)
    return [*opening_messages(problem), *episode(problem)]


# -------------------------------------------------------------------------------------------- what is learnt from


def test_an_episodes_ids_are_those_a_rollout_appends_turn_by_turn(prompter):
    messages = clean_episode(kind="full_update")
    ids = prompter.opening(messages[:2], TOOLS)
    expected_mask = [0] * len(ids)
    for turn, result in zip(messages[2::2], [*messages[3::2], None], strict=True):
        sampled = [*prompter.encode(turn["content"]), prompter.tokenizer.eos_token_id]
        observed = prompter.observation([result]) if result else []
        ids = ids + sampled + observed
        expected_mask += [1] * len(sampled) + [0] * len(observed)
    assert encode_episode(prompter, messages, TOOLS) == Example(ids, expected_mask)


def test_the_dialogue_reads_as_the_template_renders_it_whole(prompter):
    messages = clean_episode(kind="two_tickets")
    whole = prompter.tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert prompter.tokenizer.decode(encode_episode(prompter, messages, TOOLS).ids) + "\n" == whole


@pytest.mark.parametrize(
    "roles", [["assistant"], ["user", "assistant", "tool"], ["user", "assistant", "assistant"], []], ids=str
)
def test_an_episode_without_turns_in_order_is_refused(prompter, roles):
    with pytest.raises(EpisodeError):
        encode_episode(prompter, [{"role": role, "content": "x"} for role in roles], [])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("", "no episodes"),
        ('{"messages": [{"role": "user"}]}', "episode 0"),
        ("[1]", "episode 0"),
    ],
)
def test_a_bad_episode_file_is_named_with_the_reason(tmp_path, text, reason):
    path = tmp_path / "episodes.jsonl"
    path.write_text(text)
    with pytest.raises(EpisodeError, match=reason) as error:
        load_episodes(path)
    assert "episodes.jsonl" in str(error.value)


def test_the_loss_is_the_mean_over_assistant_tokens_of_all_episodes(prompter, model):
    examples = [encode_episode(prompter, clean_episode(seed), TOOLS) for seed in range(3)]
    assert len({len(example.ids) for example in examples}) > 1, "padding must be in play"
    losses = []
    for example in examples:
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([example.ids])).logits[0].log_softmax(-1)
        losses += [-logprobs[i - 1, example.ids[i]].item() for i in range(len(example.ids)) if example.mask[i]]
    with torch.no_grad():
        loss = Imitator(model, prompter.tokenizer.pad_token_id, lr=0.0).loss(examples).item()
    assert loss == pytest.approx(sum(losses) / len(losses), abs=1e-4)


# ------------------------------------------------------------------------------------------------- the commands


def test_any_teachers_episodes_can_be_imitated(tmp_path, capsys):
    problem = draw_problem(random.Random(4), "desk", "owner")
    refusal = [*opening_messages(problem), {"role": "assistant", "content": "I would rather not.<done>"}]
    episodes = tmp_path / "episodes.jsonl"
    episodes.write_text(json.dumps({"messages": refusal, "tools": TOOLS}) + "\n")
    arguments = ["--model", str(SHIPPED), "--episodes", str(episodes), "--out", str(tmp_path / "out")]
    warm_start.main([*arguments, "--tools-channel", "template", "--steps", "40", "--lr", "3e-3"])
    assert "step 40: loss" in capsys.readouterr().out
    taught = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    prompter = Prompter(AutoTokenizer.from_pretrained(tmp_path / "out"), "template")
    ids = prompter.opening(refusal[:2], TOOLS)
    said = taught.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :]
    assert prompter.decode(said.tolist()) == "I would rather not.<done>"


def test_the_command_that_made_the_shipped_policy_still_works(tmp_path, capsys):
    arguments = ["--max-steps", "5", "--batch-size", "4", "--eval-tasks", "0"]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        tiny_policy.main(["--out", str(tmp_path / name), "--seed", seed, *arguments])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert lines[0]["loss"] < lines[0]["first_loss"] - 1
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    shipped = AutoModelForCausalLM.from_pretrained(SHIPPED)
    assert made.config.to_diff_dict() == shipped.config.to_diff_dict()
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (SHIPPED / "tokenizer.json").read_bytes()
    assert (tmp_path / "a" / "chat_template.jinja").read_bytes() == (SHIPPED / "chat_template.jinja").read_bytes()


# -------------------------------------------------------------------------------------------- the shipped policy


def test_shipped_policy_is_small_untied_and_complete():
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 8_000_000
    assert json.loads((SHIPPED / "config.json").read_text())["tie_word_embeddings"] is False


def test_ids_numbers_and_names_are_single_tokens_and_tags_survive_decoding(prompter):
    words = [f"T{n}" for n in range(10, 34)] + list("12345") + ["ana", "cleo", "closed", "set_status", "noisy"]
    for word in words:
        assert len(prompter.encode(f'"{word}"')) == 3, word
    for tag in ("<tool_call>", "</tool_call>", "<done>"):
        assert len(prompter.encode(tag)) == 1 and prompter.decode(prompter.encode(tag)) == tag
    assert prompter.decode([prompter.tokenizer.eos_token_id]) == ""
    odd = "Grüße, 漢字\t 100% {}"
    assert prompter.decode(prompter.encode(odd)) == odd


def test_every_shipped_tasks_first_prompt_is_short(prompter):
    lengths = []
    for split in ("train", "heldout"):
        for task in load_tasks(f"configs/tasks/tracker_{split}.json"):
            lengths.append(len(prompter.first(task, TOOLS)[1]))
    assert 200 < min(lengths) and max(lengths) <= 280


def test_shipped_policy_starts_with_skill_and_bad_habits(prompter, model):
    todo = [problem for _, problem in problems("heldout", 48, seed=1)]
    sampled, _ = play(model, prompter, todo, temperature=1.0, seed=0)
    greedy, _ = play(model, prompter, todo, temperature=0.0, seed=0)
    assert 0.2 <= sum(sampled) / 48 <= 0.6
    assert sum(greedy) / 48 >= 0.5
