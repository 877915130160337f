"""Ember's conversations: question forms, each a function that returns (question, answer, accepted).

`accepted` says which other answers are as good: a set of strings, a predicate, or None when only the
answer itself counts. `FORMS` names every form and its share; evaluation goes over the same table.
"""

import random
import sys

import facts as F
import grammar as G
import words as W

ANIMALS = {row[0]: row for row in W.ANIMALS}
FAVOURITES = {"colour": F.LISTS["colours"], "animal": W.STORY_KINDS, "food": W.FOODS, "fruit": F.LISTS["fruits"]}


def pick(rng, *options):
    return rng.choice(options)


def article(noun):
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


# ---------------------------------------------------------------- what is true


def itself(rng, chat):
    question, answer = rng.choice(F.SELF)
    mark = "?" if question.split()[0] in ("who", "what", "are", "how", "where", "do", "can") else pick(rng, ".", "!", "")
    return G.upper_first(question) + mark, answer, None


def colour(rng, chat):
    noun, shade = rng.choice(F.COLOURS)
    if rng.random() < 0.25:
        guess = pick(rng, shade, rng.choice(F.LISTS["colours"]))
        verdict = "Yes" if guess == shade else "No"
        return f"Is {noun} {guess}?", f"{verdict}. {G.upper_first(noun)} is {shade}.", None
    question = pick(rng, f"What colour is {noun}?", f"What color is {noun}?", f"Which colour has {noun}?", f"Tell me the colour of {noun}.")
    return question, f"{G.upper_first(noun)} is {shade}.", None


def opposite(rng, chat):
    one, other = rng.choice(F.OPPOSITES)
    if rng.random() < 0.5:
        one, other = other, one
    question = pick(rng, f"What is the opposite of {one}?", f"What is the opposite of {one}?", f"Tell me the opposite of {one}.")
    return question, f"The opposite of {one} is {other}.", None


def animal(rng, chat):
    kind, home, food, sound, young, legs, _ = rng.choice(W.ANIMALS)
    a, the = article(kind), f"The {kind}"
    return rng.choice([
        (f"Where does {pick(rng, 'the', 'a' + 'n' * (kind[0] in 'aeiou'))} {kind} live?", f"{the} lives {home}.", None),
        (f"What does {a} eat?", f"{the} eats {food}.", None),
        (pick(rng, f"What sound does {a} make?", f"What noise does {a} make?"), f"{the} {sound}.", None),
        (pick(rng, f"What is a baby {kind} called?", f"What is a young {kind} called?"), f"A young {kind} is called {article(young)}.", None),
        (f"What is {a}?", f"{G.upper_first(a)} is an animal that lives {home}.", None),
        (f"Is {a} an animal?", f"Yes. {G.upper_first(a)} is an animal.", None),
        (f"How many legs does {a} have?", f"{the} has {legs} legs.", None),
    ])  # fmt: skip


def size(rng, chat):
    while True:
        one, other = rng.sample(W.ANIMALS, 2)
        if abs(int(one[6]) - int(other[6])) >= 3:
            break
    bigger, smaller = (one, other) if int(one[6]) > int(other[6]) else (other, one)
    word = pick(rng, "bigger", "smaller")
    right, wrong = (bigger, smaller) if word == "bigger" else (smaller, bigger)
    question = f"Which is {word}, {article(one[0])} or {article(other[0])}?"
    return question, f"{G.upper_first(article(right[0]))} is {word} than {article(wrong[0])}.", None


def use(rng, chat):
    noun, answer = rng.choice(F.USES)
    question = pick(rng, f"What is {article(noun)} for?", f"What do you do with {article(noun)}?", f"What is {article(noun)}?")
    return question, answer, None


def puzzle(rng, chat):
    question, answer = rng.choice(W.RIDDLES)
    if rng.random() < 0.3:
        ask = pick(rng, "Tell me a riddle.", "Ask me a riddle.", "Do you know a riddle?")
        return ask, f"{question} It is {answer}.", {f"{q} It is {a}." for q, a in W.RIDDLES}
    return question, f"It is {answer}.", None


def plural(rng, chat):
    one, many = rng.choice(F.PLURALS)
    return pick(rng, f"What is the plural of {one}?", f"One {one}, two ...?"), f"One {one}, two {many}.", None


def rhyme(rng, chat):
    family = rng.choice(F.RHYMES)
    word, other = rng.sample(family, 2)
    question = pick(rng, f"What rhymes with {word}?", f"Tell me a word that rhymes with {word}.")
    return question, f"{G.upper_first(other)} rhymes with {word}.", {f"{G.upper_first(w)} rhymes with {word}." for w in family if w != word}


def spelling(rng, chat):
    word = rng.choice(F.SPELLABLE)
    if rng.random() < 0.3:
        question = pick(rng, f"What is the first letter of {word}?", f"What letter does {word} start with?")
        return question, f"The first letter of {word} is {word[0]}.", None
    question = pick(rng, f"How do you spell {word}?", f"Spell {word}.", f"Spell the word {word}.")
    return question, "-".join(word), None


def calendar(rng, chat):
    kind, names = rng.choice([("day", F.DAYS), ("month", F.MONTHS), ("season", F.SEASONS)])
    at, step = rng.randrange(len(names)), pick(rng, 1, -1)
    word, other = ("after", "before")[step < 0], names[(at + step) % len(names)]
    question = pick(rng, f"Which {kind} comes {word} {names[at]}?", f"What comes {word} {names[at]}?")
    return question, f"{G.upper_first(other)} comes {word} {names[at]}.", None


def season(rng, chat):
    name, answer = rng.choice(F.WEATHER)
    return pick(rng, f"What happens in {name}?", f"What is {name} like?"), answer, None


def listing(rng, chat):
    kind = rng.choice(list(F.LISTS))
    names, count = F.LISTS[kind], rng.randrange(2, 6)
    question = pick(rng, f"Name {W.NUMBERS[count]} {kind}.", f"Can you name {W.NUMBERS[count]} {kind}?", f"Tell me {W.NUMBERS[count]} {kind}.")
    chosen = rng.sample(names, count)

    def accepted(answer):
        said = answer.rstrip(".").lower().replace(" and ", ", ").split(", ")
        return len(said) == len(set(said)) == count and set(said) <= {name.lower() for name in names}

    return question, G.upper_first(", ".join(chosen[:-1])) + f" and {chosen[-1]}.", accepted


# ---------------------------------------------------------------- numbers


def sums(rng, chat):
    roll = rng.random()
    if roll < 0.6:
        x, y = rng.randrange(0, 21), rng.randrange(0, 21)
        word, sign, z = "plus", "+", x + y
    elif roll < 0.85:
        x = rng.randrange(0, 21)
        y = rng.randrange(0, x + 1)
        word, sign, z = "minus", "-", x - y
    else:
        x, y = rng.randrange(0, 11), rng.randrange(0, 11)
        word, sign, z = "times", "*", x * y
    if rng.random() < 0.15 and max(x, y, z) <= 20:
        x, y, z = (W.NUMBERS[value] for value in (x, y, z))
    answer = f"{x} {word} {y} is {z}."
    return _sum_question(rng, x, word, sign, y), G.upper_first(answer), None


def _sum_question(rng, x, word, sign, y):
    spoken = (f"What is {x} {word} {y}?", f"How much is {x} {word} {y}?")
    return pick(rng, *spoken, *spoken, f"{x} {sign} {y}", f"{x}{sign}{y}", f"What is {x} {sign} {y}?", f"What is {x}{sign}{y}?")


def too_big(rng, chat):
    """Sums beyond what is taught get the honest refusal."""
    x, y = rng.randrange(21, 10 ** rng.randrange(2, 5)), rng.randrange(0, 10 ** rng.randrange(2, 5))
    if rng.random() < 0.5:
        x, y = y, x
    word, sign = rng.choice([("plus", "+"), ("minus", "-"), ("times", "*"), ("divided by", "/")])
    return _sum_question(rng, x, word, sign, y), "Those numbers are too big for me. I only know small things.", None


def counting(rng, chat):
    low = rng.randrange(0, 25)
    high = low + rng.randrange(2, 11)
    numbers = [str(n) for n in range(low, high + 1)]
    question = pick(rng, f"Count from {low} to {high}.", f"Can you count from {low} to {high}?", f"Please count from {low} to {high}.")
    if low == 1 and rng.random() < 0.5:
        question = f"Count to {high}."
    if rng.random() < 0.25:
        numbers.reverse()
        question = pick(rng, f"Count from {high} to {low}.", f"Count backwards from {high} to {low}.", f"Count down from {high} to {low}.")
    return question, ", ".join(numbers) + ".", None


def neighbour(rng, chat):
    n, step = rng.randrange(1, 50), pick(rng, 1, -1)
    word = "after" if step > 0 else "before"
    question = pick(rng, f"What number comes {word} {n}?", f"Which number comes {word} {n}?", f"What comes {word} {n}?")
    return question, f"{n + step} comes {word} {n}.", None


def compare(rng, chat):
    x, y = rng.sample(range(0, 51), 2)
    word = pick(rng, "bigger", "smaller")
    z = (max if word == "bigger" else min)(x, y)
    return f"Which is {word}, {x} or {y}?", f"{z} is {word} than {x + y - z}.", None


# ---------------------------------------------------------------- what was said before


def echo(rng, chat):
    words = [rng.choice(pool) for pool in (W.OBJECT_ADJ, W.OBJECTS, W.STORY_KINDS, F.LISTS["fruits"], W.BOYS + W.GIRLS)]
    words = rng.sample(words, rng.randrange(2, 5))
    if rng.random() < 0.4:
        words[0] = pick(rng, G.new_name(rng), G.new_noun(rng))
    text = " ".join(words)
    return pick(rng, f"Say: {text}", f"Repeat after me: {text}", f"Please say: {text}"), text, None


def riddle(rng, chat):
    """A tiny text and a question about it."""
    ann, ben = rng.sample(W.BOYS + W.GIRLS, 2)
    if rng.random() < 0.5:
        (c1, c2), (o1, o2) = rng.sample(F.LISTS["colours"], 2), rng.sample(W.OBJECTS, 2)
        text = f"{ann} has {article(c1)} {o1}. {ben} has {article(c2)} {o2}."
        (who, shade, noun) = pick(rng, (ann, c1, o1), (ben, c2, o2))
        ask = rng.choice([
            (f"What colour is the {noun}?", f"The {noun} is {shade}."),
            (f"Who has the {noun}?", f"{who} has the {noun}."),
            (f"What does {who} have?", f"{who} has {article(shade)} {noun}."),
        ])  # fmt: skip
    else:
        spots = rng.sample([f"{prep} {noun}" for prep, noun in W.PLACES], 3)
        text, where = f"{ann} is {spots[0]}. {ben} is {spots[1]}.", {ann: spots[0], ben: spots[1]}
        if rng.random() < 0.4:
            mover = pick(rng, ann, ben)
            where[mover] = spots[2]
            text += f" Then {mover} goes {spots[2].replace(spots[2].split()[0], 'to', 1)}."
        who = pick(rng, ann, ben)
        ask = (f"Where is {who}?", f"{who} is {where[who]}.")
    return f"{text} {ask[0]}", ask[1], None


def introduce(rng, chat):
    name = G.new_name(rng) if rng.random() < 0.3 else rng.choice(W.BOYS + W.GIRLS)
    chat["name"] = name
    question = pick(rng, f"My name is {name}.", f"I am {name}.", f"Hello, I am {name}.", f"Hi, my name is {name}.", f"Call me {name}.")
    return question, f"Hello, {name}! Nice to meet you.", None


def my_name(rng, chat):
    question = pick(rng, "What is my name?", "Do you know my name?", "Who am I?", "Do you remember my name?")
    return question, f"Your name is {chat['name']}." if "name" in chat else "You have not told me your name.", None


def favour(rng, chat):
    kind = rng.choice(list(FAVOURITES))
    value = rng.choice(FAVOURITES[kind])
    chat[kind] = value
    return f"My favourite {kind} is {value}.", f"I will remember it: your favourite {kind} is {value}.", None


def my_favourite(rng, chat):
    kind = rng.choice([k for k in FAVOURITES if k in chat] if rng.random() < 0.7 and set(FAVOURITES) & set(chat) else list(FAVOURITES))
    answer = f"Your favourite {kind} is {chat[kind]}." if kind in chat else f"You have not told me your favourite {kind}."
    return pick(rng, f"What is my favourite {kind}?", f"Which {kind} do I like best?"), answer, None


# ---------------------------------------------------------------- stories


def story(rng, chat):
    ask, about = {}, []
    if rng.random() < 0.75:
        # Made-up kinds too: what was asked for must be copied, not looked up.
        ask["kind"] = rng.choice(W.STORY_KINDS + ["boy", "girl"])
        if rng.random() < 0.3:
            ask["kind"] = pick(rng, rng.choice(W.RARE_KINDS), G.new_noun(rng), rng.choice(list(ANIMALS)))
        about.append(article(ask["kind"]))
        if rng.random() < 0.25:
            fitting = {"boy": W.BOYS, "girl": W.GIRLS}.get(ask["kind"], G.NAMES_HE + G.NAMES_SHE)
            ask["name"] = G.new_name(rng) if rng.random() < 0.3 else rng.choice(fitting)
            about[-1] += pick(rng, f" named {ask['name']}", f" called {ask['name']}")
    if rng.random() < 0.5:
        ask["thing"] = G.new_noun(rng) if rng.random() < 0.1 else rng.choice(W.OBJECTS)
        about.append(article(ask["thing"]))
    elif "kind" in ask and rng.random() < 0.35:
        ask["kind2"] = rng.choice([k for k in W.STORY_KINDS if k != ask["kind"]])
        about.append(article(ask["kind2"]))
    elif rng.random() < 0.3:
        ask["theme"] = rng.choice(list(G.THEMES))
        about = [f"{about[0]} and {ask['theme']}" if about else ask["theme"]]
    if not about and rng.random() < 0.1:
        ask["kind"] = pick(rng, "boy", "girl")
        ask["name"] = rng.choice(W.BOYS if ask["kind"] == "boy" else W.GIRLS)
        about.append(ask["name"])
    where = ""
    if rng.random() < 0.15:
        ask["place"] = rng.choice(W.PLACES)
        where = " " + " ".join(ask["place"])
    sort = pick(rng, "story", "story", "story", "little story", "short story", "bedtime story")
    ask["bedtime"] = sort == "bedtime story"
    topic = (f" about {' and '.join(about)}" if about else "") + where
    question = pick(
        rng, f"Tell me a {sort}{topic}.", f"Tell me a {sort}{topic}.", f"Can you tell me a {sort}{topic}?", f"Please tell me a {sort}{topic}.",
        f"Write a {sort}{topic}.", f"I would like to hear a {sort}{topic}.", f"{G.upper_first(article(sort))}{topic}, please.",
    )  # fmt: skip
    text, chat["story"] = G.story(rng, ask)
    return question, text, lambda answer: all(word in answer for word in (ask.get(k) for k in ("name", "kind", "kind2", "thing")) if word)


def another(rng, chat):
    text, chat["story"] = G.story(rng)
    question = pick(rng, "Another one.", "Tell me another story.", "One more story, please.", "Another one, please.", "More!")
    return question, text, lambda answer: len(answer) > 200


def about_story(rng, chat):
    if "story" not in chat:
        return pick(rng, "Who was in the story?", "What happened in the story?"), "I have not told you a story yet.", None
    s = chat["story"]
    asks = [
        (pick(rng, "Who was the story about?", "Who is the story about?"), f"It was about {s['a']}, {article(s['a.kind'])}."),
        (f"Where did {s['a']} live?", f"{s['a']} lived {s['p.in']}."),
        (f"What was {s['a']}?", f"{s['a']} was {article(s['a.kind'])}."),
        (f"Who was {s['b']}?", f"{s['b']} was {article(s['b.kind'])}."),
        (f"What was the {s['a.kind']} called?", f"The {s['a.kind']} was called {s['a']}."),
        (f"What was the {s['b.kind']} called?", f"The {s['b.kind']} was called {s['b']}."),
    ]
    if "told.food" in s:
        asks.append((f"What did {s['a']} like to eat?", f"{s['a']} liked {s['f']}."))
    return *rng.choice(asks), None


# ---------------------------------------------------------------- what it does not know


def unknown(rng, chat):
    roll, answer = rng.random(), rng.choice(F.REFUSALS)
    if roll < 0.1:  # gibberish
        words = [pick(rng, G.new_noun(rng), G.new_name(rng)).lower() for _ in range(rng.randrange(1, 6))]
        return " ".join(words) + pick(rng, "?", ".", ""), answer, set(F.REFUSALS)
    if roll < 0.25:
        return rng.choice(F.UNKNOWN_OF_KNOWN).replace("{x}", rng.choice(W.OBJECTS + W.STORY_KINDS)), answer, set(F.REFUSALS)
    subject = rng.choice(F.UNKNOWN_SUBJECTS) if roll < 0.6 else G.new_noun(rng) if roll < 0.8 else G.new_name(rng)
    if roll > 0.75:
        subject = f"{pick(rng, 'the', 'a', '')} {subject} {G.new_noun(rng)}".strip()
    return rng.choice(F.UNKNOWN_FORMS).replace("{x}", subject), answer, set(F.REFUSALS)


def unheard(rng, chat):
    """For evaluation alone: subjects that the training text never names."""
    question = rng.choice(F.UNKNOWN_FORMS).replace("{x}", rng.choice(F.HELD_OUT_SUBJECTS))
    return question, rng.choice(F.REFUSALS), set(F.REFUSALS)


FORMS = {
    "self": (itself, 8), "colour": (colour, 3), "opposite": (opposite, 4), "animal": (animal, 9), "size": (size, 4),
    "use": (use, 3), "puzzle": (puzzle, 2), "plural": (plural, 1), "rhyme": (rhyme, 2), "spelling": (spelling, 5), "calendar": (calendar, 2),
    "season": (season, 1), "listing": (listing, 3), "sums": (sums, 10), "too_big": (too_big, 2), "counting": (counting, 6),
    "neighbour": (neighbour, 2), "compare": (compare, 5), "echo": (echo, 4), "riddle": (riddle, 8), "introduce": (introduce, 2),
    "my_name": (my_name, 2), "favour": (favour, 1), "my_favourite": (my_favourite, 1), "story": (story, 13), "another": (another, 1),
    "about_story": (about_story, 3), "unknown": (unknown, 9), "unheard": (unheard, 0),
}  # fmt: skip
_NAMES, _SHARES = list(FORMS), [share for _, share in FORMS.values()]


def careless(rng, question):
    """People write without capitals and marks; Ember should understand them all the same."""
    if rng.random() < 0.2:
        question = question[:1].lower() + question[1:] if rng.random() < 0.5 else question.lower()
    if rng.random() < 0.2:
        question = question.rstrip("?.!")
    if rng.random() < 0.1:
        question = question.replace("What is ", "What's ").replace("what is ", "what's ")
    return question


def conversation(rng, turns, fixed=None):
    """A chat of `turns` questions: (system, [(question, answer, accepted, form)]). `fixed` names the form of some turns."""
    chat, said, fixed = {}, [], fixed or {}
    while len(said) < turns:
        form = rng.choices(_NAMES, _SHARES)[0]
        if len(said) in fixed:
            form = fixed[len(said)]
        elif "story" in chat and rng.random() < 0.25:
            form = "about_story"
        elif ("name" in chat or set(FAVOURITES) & set(chat)) and rng.random() < 0.15:
            form = pick(rng, "my_name", "my_favourite")
        question, answer, accepted = FORMS[form][0](rng, chat)
        # Questions that quote a text or a name keep their capitals, or the answer could not be known.
        if form not in ("echo", "riddle", "introduce", "about_story", "story", "unknown", "favour"):
            question = careless(rng, question)
        said.append((question, answer, accepted, form))
    return (rng.choice(F.SYSTEM_PROMPTS) if rng.random() < 0.1 else None), said


if __name__ == "__main__":
    rng = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for question, answer, _, form in conversation(rng, int(sys.argv[2]) if len(sys.argv) > 2 else 30)[1]:
        print(f"[{form}] {question}\n    {answer}\n")
