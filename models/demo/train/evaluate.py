"""Measures an exported Ember folder with `transformers`: exact answers by question form, and story consistency.

    python evaluate.py FOLDER [--each 100] [--stories 200] [--out FILE]

Greedy answers count as right when they equal the grammar's answer or one the grammar accepts. A story counts as
consistent when `flaws` finds nothing; the grammar's own stories are put through the same check.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import chat
import corpus
import grammar
import words as W

KNOWN_NAMES = set(grammar.NAMES_HE + grammar.NAMES_SHE)
NOT_NAMES = {"I", "Sunday", "Sundays", "Click", "Crash"}
# Forms whose question is about an earlier turn, and what that turn must then be.
OPENERS = {"about_story": "story", "my_name": "introduce", "my_favourite": "favour"}


# ---------------------------------------------------------------- stories


def flaws(text, ended):
    """What is inconsistent in a story: names never introduced, a fourth name, a kind or object that changes."""
    found = []
    if not ended:
        found.append("no end")
    names = set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", text)) | (set(re.findall(r"[A-Z][a-z]+", text)) & KNOWN_NAMES)
    names -= NOT_NAMES
    if len(names) > 3:
        found.append("more than three names")
    kinds = {name: set() for name in names}
    for pattern in (
        r"\b[Aa]n? \w+ (?P<kind>\w+) (?:named|called) (?P<name>[A-Z]\w+)",
        r"(?P<name>[A-Z]\w+)(?:,| was) an? (?P<adj>\w+) (?P<kind>\w+)(?=[,.]| who)",
        r"\b[Aa]n? \w+ (?P<kind>\w+)\. (?:His|Her) name was (?P<name>[A-Z]\w+)",
        r"\bstory of (?P<name>[A-Z]\w+) the (?P<kind>\w+)",
        r"\band (?P<name>[A-Z]\w+) the (?P<kind>\w+)\.",
    ):
        for match in re.finditer(pattern, text):
            if match["name"] in kinds:
                kinds[match["name"]].add(match["kind"])
    found += [f"{name} is never introduced" for name, kind in kinds.items() if not kind]
    found += [f"{name} is {' and '.join(sorted(kind))}" for name, kind in kinds.items() if len(kind) > 1]
    owned = {}
    for adj, noun in re.findall(rf"(?<!Mine is )\b(?:a|an|the|my|your) ({'|'.join(W.OBJECT_ADJ)}) ({'|'.join(W.OBJECTS)})\b", text):
        owned.setdefault(noun, set()).add(adj)
    found += [f"{noun} is {' and '.join(sorted(adj))}" for noun, adj in owned.items() if len(adj) > 1]
    return found


def judge(stories):
    """(share of consistent stories, what was wrong most often)."""
    bad = [flaws(text, ended) for text, ended in stories]
    kinds = Counter(re.sub(r"^\w+ is (?!never)(.*)", r"a thing or kind changes", re.sub(r"^\w+ is never", "a name is never", f)) for b in bad for f in set(b))
    return {"consistent": round(sum(not b for b in bad) / len(bad), 3), "flaws": dict(kinds.most_common())}


# ---------------------------------------------------------------- generation


class Writer:
    def __init__(self, folder, device):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.device = device

    def __call__(self, prompts, most, batch=64, **how):
        """Continues texts that already hold their special tokens: [(continuation, whether it ended)]."""
        out = []
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for at in range(0, len(order), batch):
            print(f"{at} of {len(order)}", file=sys.stderr, flush=True)
            texts = [prompts[i] for i in order[at : at + batch]]
            inputs = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(self.device)
            inputs.pop("token_type_ids", None)
            with torch.no_grad():
                ids = self.model.generate(**inputs, max_new_tokens=most, **how)
            for row in ids[:, inputs["input_ids"].shape[1] :].tolist():
                text = self.tokenizer.decode(row)
                body = re.split(r"<\|(?:end|eos)\|>", text)[0]
                out.append((body, body != text))
        return [result for _, result in sorted(zip(order, out))]


def questions(each):
    """(form, prompt, wanted, accepted) for every form, after nought to three earlier turns."""
    rng = random.Random("evaluation")
    for form in chat.FORMS:
        for number in range(each):
            if form in OPENERS:
                fixed = {0: OPENERS[form], 2: form} if number % 4 else {2: form}
            else:
                fixed = {rng.choice((0, 0, 1, 3)): form}
            system, turns = chat.conversation(rng, max(fixed) + 1, fixed)
            *before, (question, wanted, accepted, _) = turns
            prompt = corpus.render(system, [*before, (question, "")])
            yield form, prompt.removesuffix(corpus.END), wanted, accepted


def right(answer, ended, wanted, accepted):
    if not ended:
        return False
    if callable(accepted):
        return bool(accepted(answer))
    return answer == wanted or (accepted is not None and answer in accepted)


def answers(writer, each):
    """Greedy answers: the share that is right by form, and the wrong ones."""
    asked = list(questions(each))
    wrong, score = [], Counter()
    for told, most in ((False, 64), (True, 600)):
        group = [q for q in asked if (q[0] in ("story", "another")) == told]
        replies = writer([q[1] for q in group], most, do_sample=False)
        for (form, prompt, wanted, accepted), (answer, ended) in zip(group, replies):
            if right(answer, ended, wanted, accepted):
                score[form] += 1
            else:
                wrong.append({"form": form, "prompt": prompt[-300:], "wanted": wanted[:200], "got": answer[:200]})
    return {form: round(score[form] / each, 3) for form in chat.FORMS}, wrong


def stories(writer, count):
    """Continues fresh opening sentences: the share that is consistent, the flawed ones and some samples."""
    rng = random.Random("stories")
    own = [grammar.story(rng)[0] for _ in range(count)]
    openings = [corpus.BOS + text[: text.index(". ") + 1] for text in own]
    report = {"the grammar itself": judge([(text, True) for text in own])}
    ways = {"greedy": {"do_sample": False}, "temperature 0.8": {"do_sample": True, "temperature": 0.8, "top_p": 1.0, "top_k": 0}}
    for name, how in ways.items():
        replies = writer(openings, 600, **how)
        told = [(opening.removeprefix(corpus.BOS) + text, ended) for opening, (text, ended) in zip(openings, replies)]
        report[name] = judge(told)
        report[name]["samples"] = [text for text, _ in told[:4]]
        report[name]["flawed"] = [(flaws(*one), one[0]) for one in told if flaws(*one)][:8]
    return report


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("folder", type=Path)
    args.add_argument("--each", type=int, default=100, help="questions a form; 0: none")
    args.add_argument("--stories", type=int, default=200, help="stories a way of sampling; 0: none")
    args.add_argument("--out", type=Path, help="where the full report goes, as JSON")
    args.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = args.parse_args()
    torch.manual_seed(1)
    writer = Writer(args.folder, args.device)
    report = {}
    if args.each:
        report["answers"], report["wrong"] = answers(writer, args.each)
        print(json.dumps(report["answers"], indent=1), flush=True)
    report["stories"] = stories(writer, args.stories) if args.stories else {}
    for name, result in report["stories"].items():
        print(name, result["consistent"], result["flaws"], flush=True)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
