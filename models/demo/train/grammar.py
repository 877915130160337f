"""The grammar that writes Ember's stories: a template engine, a cast, and the skeletons of `skeletons.txt`.

    python grammar.py [SEED] [COUNT]     prints sample documents

Every name, thing and place of a story is drawn once and referred to again later, so that a model can only
predict the later words by attending to the earlier ones.
"""

import functools
import random
import re
import sys
from pathlib import Path

import words as W

# ---------------------------------------------------------------- templates


@functools.lru_cache(maxsize=None)
def parse(text):
    """Parses a template into a tuple of parts: str, ("slot", key), ("macro", key) or ("alt", parts, ...)."""
    parts, end = _parse_until(text, 0, "")
    assert end == len(text), f"unbalanced bracket in template: {text}"
    return parts


def _parse_until(text, at, stops):
    parts, literal = [], ""
    while at < len(text) and text[at] not in stops:
        char = text[at]
        if char == "[":
            options, at = [], at + 1
            while True:
                option, at = _parse_until(text, at, "|]")
                options.append(option)
                at += 1
                if text[at - 1] == "]":
                    break
            part = ("alt", *options)
        elif char in "{<":
            close = text.index("}" if char == "{" else ">", at)
            part = ("slot" if char == "{" else "macro", text[at + 1 : close])
            at = close + 1
        else:
            literal += char
            at += 1
            continue
        if literal:
            parts.append(literal)
            literal = ""
        parts.append(part)
    if literal:
        parts.append(literal)
    return tuple(parts), at


def expand(rng, parts, slots):
    """Fills a parsed template: choices at random, slots from `slots` (values may be templates themselves)."""
    out = []
    for part in parts:
        if isinstance(part, str):
            out.append(part)
        elif part[0] == "alt":
            out.append(expand(rng, part[1 + int(rng.random() * (len(part) - 1))], slots))
        elif part[0] == "macro":
            options = W.MACROS[part[1]]
            out.append(options[int(rng.random() * len(options))])
        else:
            out.append(_slot(rng, part[1], slots))
    return "".join(out)


def _slot(rng, key, slots):
    head, dot, tail = key.partition(".")
    if tail and tail[0].isupper():  # {a.He}: the same slot, capitalised
        return upper_first(_slot(rng, f"{head}.{tail[0].lower()}{tail[1:]}", slots))
    value = slots[key]
    if isinstance(value, tuple):
        value = value[int(rng.random() * len(value))]
    return expand(rng, parse(value), slots) if "{" in value else value


def upper_first(text):
    return text[:1].upper() + text[1:]


_SENTENCE = re.compile(r'(^|[.!?] |\." )([a-z])')
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeio]|honest|un[^i]|um|ug)")


def say(rng, template, slots):
    """Expands a template and mends what chance breaks: sentence capitals and a/an."""
    text = expand(rng, parse(template), slots)
    text = _ARTICLE.sub(r"\1n ", text)
    return _SENTENCE.sub(lambda m: m.group(1) + m.group(2).upper(), text).strip()


# ---------------------------------------------------------------- the cast

HE = {"he": "he", "him": "him", "his": "his", "self": "himself"}
SHE = {"he": "she", "him": "her", "his": "her", "self": "herself"}
NAMES_HE, NAMES_SHE = W.BOYS + W.PET_NAMES_HE, W.GIRLS + W.PET_NAMES_SHE
GIVERS = {"grandmother": SHE, "grandfather": HE, "aunt": SHE, "uncle": HE, "mother": SHE, "father": HE}


def new_name(rng):
    """A made-up name, so that names are copied rather than remembered."""
    syllable = lambda: rng.choice("b d f g k l m n p r s t v z sh th dr tr".split()) + rng.choice("a e i o u".split())
    return upper_first("".join(syllable() for _ in range(rng.choice((2, 2, 3)))) + rng.choice(["", "", "n", "r", "l", "x"]))


def new_noun(rng):
    """A made-up kind or thing, for requests only: `a story about a plimkin`."""
    start = rng.choice("bl pl gr sn w fl sk m d z qu t h cr tw".split())
    return start + rng.choice("a e i o u oo ee".split()) + rng.choice("bb mp zz ll nk rt g v ff".split()) + rng.choice(
        ["le", "in", "er", "o", "kin", "ow", "it"]
    )


def being(rng, slot, slots, taken, kind=None, name=None, elder=False):
    """Draws one of the cast into `slots` under `slot.*`; `taken` holds the names and kinds in use."""
    if kind is None:
        people = W.TRADES if elder else ["boy", "girl"]
        pool = people if rng.random() < (0.6 if elder else 0.3) else W.STORY_KINDS
        kind = rng.choice([k for k in pool if k not in taken] or W.STORY_KINDS)
    he = name in NAMES_HE or (name not in NAMES_SHE and rng.random() < 0.5)
    if kind in ("boy", "prince", "king", "wizard", "knight"):
        he = True
    elif kind in ("girl", "princess", "queen", "fairy"):
        he = False
    human = kind in W.TRADES or kind in ("boy", "girl") or kind in W.RARE_KINDS
    if name is None:
        people, all_names = (W.BOYS, NAMES_HE) if he else (W.GIRLS, NAMES_SHE)
        pool = people if human else all_names
        while name is None or name in taken:
            name = new_name(rng) if rng.random() < 0.04 else rng.choice(pool)
    taken.update((kind, name))
    adj = rng.choice(W.ELDER if elder else W.MANNERS if human else W.MANNERS + W.COATS)
    slots.update({f"{slot}.{key}": word for key, word in (HE if he else SHE).items()})
    slots[slot] = name
    slots[f"{slot}.kind"] = kind
    slots[f"{slot}.ref"] = (name, f"the {kind}")
    slots[f"{slot}.intro"] = (f"a {adj} {kind} named {name}", f"a {adj} {kind} called {name}", f"{name}, a {adj} {kind}")
    slots[f"{slot}.new"] = slots[f"{slot}.intro"][:2]
    slots[f"{slot}.intro2"] = f"a {adj} {kind}"
    slots[f"{slot}.hobby"] = rng.choice(W.HOBBIES)


def place(rng, slot, slots, taken, fixed=None):
    """Draws a place into `slots`: `{p}` the river, `{p.in}` by the river, `{p.to}` to the river."""
    prep, noun = fixed or rng.choice([row for row in W.PLACES if row[1] not in taken])
    taken.add(noun)
    slots[slot] = slots[f"{slot}.n"] = noun
    slots[f"{slot}.in"] = slots[f"{slot}.by"] = f"{prep} {noun}"
    slots[f"{slot}.to"] = f"to {noun}"
    slots[f"{slot}.far"] = f"{prep} {noun}, far away"


def thing(rng, slot, slots, noun=None):
    """Draws an object into `slots`: `{o}` red kite, `{o.n}` kite, `{o.a}` a red kite, `{o.the}` the red kite."""
    used = slots.get("o.n")
    noun = noun or rng.choice([n for n in W.OBJECTS if n != used])
    adj, other = rng.sample(W.OBJECT_ADJ, 2)
    parts = {
        "": f"{adj} {noun}", ".n": noun, ".a": f"a {adj} {noun}", ".the": f"the {adj} {noun}", ".look": adj,
        ".other": f"a {other} one",
    }  # fmt: skip
    slots.update({slot + key: text for key, text in parts.items()})


# ---------------------------------------------------------------- stories


def load_skeletons():
    """Reads `skeletons.txt`: a list of (name, theme, needs, paragraphs of beats)."""
    found = []
    for line in Path(__file__).with_name("skeletons.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        if line.startswith("=="):
            name, theme, needs = (cell.strip() for cell in line[2:].split("|"))
            found.append((name, theme, needs.split(), [[]]))
        elif not line.strip():
            if found and found[-1][3][-1]:
                found[-1][3].append([])
        elif found:
            found[-1][3][-1].append(line)
    return found


SKELETONS = load_skeletons()
THEMES = {skeleton[1]: skeleton for skeleton in SKELETONS}
# Skeletons in which any object will do, so that one may be asked for.
ANY_OBJECT = [s for s in SKELETONS if "{o" in str(s[3])]

OPENINGS = (
    "Once upon a time, there was {a.intro}. {a.He} lived {p.in}.",
    "Once upon a time, {p.in}, there lived {a.intro}.",
    "Once upon a time, {a.intro2} named {a} lived {p.in}.",
    "Once upon a time there was {a.intro2}. {a.His} name was {a}, and {a.he} lived {p.in}.",
    "Long ago, {p.in}, there lived {a.intro}.",
    "There once was {a.intro2} named {a} who lived {p.in}.",
    "{a} was {a.intro2}. {a.He} lived {p.in}.",
    "In a faraway land, {p.in}, lived {a.intro}.",
    "This is the story of {a}, {a.intro2} who lived {p.in}.",
)
HABITS = (
    "{a} was <trait> and <trait>, and {a.he} liked to {a.hobby}.",
    "More than anything else, {a} liked to {a.hobby}.",
    "Everybody knew that {a} was <trait>.",
    "{a} was a <trait> {a.kind}. In the evening {a.he} liked to {a.hobby}.",
    "What {a} liked best was to {a.hobby}.",
)
TASTES = (
    "{a.His} favourite food was {f}.",
    "{a} loved {f} more than any other food.",
    "Every Sunday {a} ate {f}.",
)
PASTIMES = (
    "Most days {a} helped {a.his} {a.giver} with the work.",
    "Most days {a} walked {q.to} and back again.",
    "On Sundays {a} visited {a.his} {a.giver}.",
    "{a} had never been far from home.",
    "Life was good, and {a} was <glad>.",
    "{a} knew every path and every stone around {p}.",
)
WISDOM = (
    "{a.His} {a.giver} always said that {saying}.",
    "{a} often thought of what {a.his} {a.giver} said: {saying}.",
)
WISDOM_ENDINGS = (
    "{a.His} {a.giver} had been right: {saying}.",
    "Now {a} knew what {a.his} {a.giver} had meant: {saying}.",
    "And {a} told everyone that {saying}.",
)
OWNING = (
    "{a} had {o.a}. It was a present from {a.his} {a.giver}.",
    "{a.His} greatest treasure was {o.a}, which {a.his} {a.giver} had given {a.him}.",
    "{a.His} {a.giver} had once given {a.him} {o.a}, and {a.he} took it everywhere.",
)
ENDINGS = (
    "The end.",
    "And so they lived happily {p.in} for many years.",
    "{a} went to bed <glad> that night and dreamed of {q}.",
    "And if you go {p.to} one day, you may meet {a} and {b} there.",
    "And {a} never forgot that day.",
    "In the evening {a} sat {p.in} and ate {f}. It had been a good day.",
    "That is the story of {a} the {a.kind} and {b} the {b.kind}.",
)
BEDTIME = ("And now it is late. Good night.", "Then {a} closed {a.his} eyes and slept. Good night.")


def cast(rng, ask):
    """Draws everything a story needs; `ask` fixes what somebody asked for."""
    slots, taken = {}, set()
    being(rng, "a", slots, taken, ask.get("kind"), ask.get("name"))
    place(rng, "p", slots, taken, ask.get("place"))
    slots["f"] = rng.choice(W.FOODS)
    slots["a.giver"] = rng.choice(list(GIVERS))
    slots["a.giver.him"] = GIVERS[slots["a.giver"]]["him"]
    return slots, taken


def scene(rng, slots, taken, ask, table):
    """Draws what changes from one episode to the next: friends, places, the object and the table row."""
    being(rng, "b", slots, taken, ask.get("kind2"))
    being(rng, "c", slots, taken, elder=True)
    place(rng, "q", slots, taken)
    place(rng, "r", slots, taken)
    thing(rng, "o", slots, ask.get("thing"))
    thing(rng, "s", slots)
    number = rng.randrange(2, 10)
    slots["n"], slots["m"] = W.NUMBERS[number], W.NUMBERS[number + rng.randrange(1, 10)]
    animal = rng.choice([row for row in W.ANIMALS if row[0] in W.STORY_KINDS and row[0] not in taken])
    slots["youngof"], slots["young"] = animal[0], animal[4]
    slots["longthing"] = rng.choice(("broom", "ladder", "carrot", "sausage", "fishing rod"))
    if table:
        for index, cell in enumerate(_cells(rng.choice(table)), start=1):
            slots[f"t{index}"] = cell


def _cells(row):
    return (row,) if isinstance(row, str) else row


def tell(rng, skeleton, slots, taken, ask, opening):
    """One episode: the opening lines, then the skeleton's beats. Returns its paragraphs."""
    _, _, needs, paragraphs = skeleton
    tables = [getattr(W, need) for need in needs if need.isupper()]
    scene(rng, slots, taken, ask, tables[0] if tables else None)
    intro = []
    if opening:
        intro = [say(rng, rng.choice(OPENINGS[:4] if rng.random() < 0.4 else OPENINGS), slots)]
        if rng.random() < 0.7:
            intro.append(say(rng, rng.choice(HABITS), slots))
        if rng.random() < 0.5:
            slots["told.food"] = "yes"
            intro.append(say(rng, rng.choice(TASTES), slots))
        if rng.random() < 0.3:
            intro.append(say(rng, rng.choice(PASTIMES), slots))
        if rng.random() < 0.25:
            slots["saying"] = rng.choice(W.SAYINGS)
            intro.append(say(rng, rng.choice(WISDOM), slots))
    if "owns" in needs:
        intro.append(say(rng, rng.choice(OWNING), slots))
    told = []
    for paragraph in paragraphs:
        beats = [beat for beat in paragraph if beat[0] != "?" or rng.random() < 0.5]
        told.append(" ".join(say(rng, beat.lstrip("?"), slots) for beat in beats))
    if intro and rng.random() < 0.5:
        told.insert(0, " ".join(intro))
    elif intro:
        told[0] = " ".join([*intro, told[0]])
    return [paragraph for paragraph in told if paragraph]


def story(rng, ask=None, episodes=1):
    """A whole story and its slots. `ask` may fix name, kind, kind2, thing, place, theme and bedtime."""
    ask = ask or {}
    slots, taken = cast(rng, ask)
    paragraphs = []
    for number in range(episodes):
        pool = [THEMES[ask["theme"]]] if "theme" in ask else ANY_OBJECT if "thing" in ask else SKELETONS
        skeleton = rng.choice(pool)
        paragraphs += tell(rng, skeleton, slots, taken, ask if number == 0 else {}, opening=number == 0)
        taken = {slots[key] for key in ("a", "a.kind", "p")}
    slots["theme"] = skeleton[1]
    if "saying" in slots:
        paragraphs[-1] += " " + say(rng, rng.choice(WISDOM_ENDINGS), slots)
    elif rng.random() < 0.6:
        paragraphs[-1] += " " + say(rng, rng.choice(ENDINGS), slots)
    if ask.get("bedtime"):
        paragraphs.append(say(rng, rng.choice(BEDTIME), slots))
    return "\n\n".join(paragraphs), slots


if __name__ == "__main__":
    rng = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 3):
        print(story(rng)[0], end="\n\n----\n\n")
