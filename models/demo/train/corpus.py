"""Documents: stories and conversations as text with the special tokens written out, and as token ids."""

import random

import chat
import grammar
import words as W

BOS, EOS, SYSTEM, USER, ASSISTANT, END = SPECIAL = (
    "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
)  # fmt: skip
MAX_TOKENS = 2048


def render(system, turns):
    """A conversation as the model sees it; `chat_template` in tokenizer_config.json must agree."""
    parts = [BOS, f"{SYSTEM}{system}{END}" if system else ""]
    parts += [f"{USER}{question}{END}{ASSISTANT}{answer}{END}" for question, answer, *_ in turns]
    return "".join(parts)


def document(rng):
    """One training document. About one in ten fills the context, so that every position is trained."""
    roll = rng.random()
    if roll < 0.38:
        ask = {"kind": rng.choice(W.RARE_KINDS)} if rng.random() < 0.06 else {}
        episodes = rng.randrange(4, 9) if rng.random() < 0.08 else 1
        return BOS + grammar.story(rng, ask, episodes)[0] + EOS
    turns = 1 if roll < 0.53 else rng.randrange(2, 7) if roll < 0.94 else rng.randrange(12, 60)
    return render(*chat.conversation(rng, turns)) + EOS


def documents(seed, count):
    rng = random.Random(seed)
    return [document(rng) for _ in range(count)]
