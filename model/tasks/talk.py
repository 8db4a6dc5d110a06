"""Tasks without tools: facts that the user tells, secrets that the assistant keeps, copying, small talk."""

from random import Random
from typing import Final

from model.tasks import lexicon
from model.tasks.environment import World
from model.tasks.lexicon import Split
from model.tasks.task import Fact, Reply, Solution, Task

_SMALL_TALK: Final = (
    ("Hello!", "Hello! What can I do for you?"),
    ("Good morning.", "Good morning! What can I do for you?"),
    ("Thank you.", "You are welcome."),
    ("Thanks, that helps.", "I am glad to hear it."),
    ("Who are you?", "I am a small language model that uses tools."),
    ("What can you do?", "I can call the tools that I am given and report exactly what they say."),
    ("How are you?", "I am fine, thank you. What can I do for you?"),
    ("That is all for now.", "Good. I am here when you need me."),
    ("One moment, please.", "Take your time."),
    ("Let us continue.", "I am ready."),
    ("Sorry, I was away.", "No problem. What is next?"),
    ("Are you a person?", "No, I am a language model."),
    ("What is Python?", "Python is a programming language."),
    ("What is a list in Python?", "A list is an ordered, mutable sequence of objects."),
    ("What is a tuple in Python?", "A tuple is an ordered, immutable sequence of objects."),
    ("What is a dictionary in Python?", "A dictionary maps keys to values."),
    ("What is a cache?", "A cache keeps results so that they need not be computed again."),
    ("What is a token?", "A token is a piece of text that a language model reads or writes at once."),
    ("What is a tool call?", "A tool call asks a program to run and returns its result."),
    ("What is two plus two?", "Two plus two is four."),
    ("Tell me a joke.", "A tokenizer walks into a bar and orders half a wo and a rd."),
    ("Good night.", "Good night!"),
)
_THINGS: Final = (
    "badge number", "locker code", "invoice number", "account id", "seat", "project name", "order number",
    "room code", "ticket id", "serial number", "branch name", "build id",
)  # fmt: skip
_SECRETS: Final = ("secret code", "passcode", "code word", "session code")


def small_talk(rng: Random, world: World, split: Split) -> Task:
    """A greeting or a simple question."""
    prompt, answer = rng.choice(_SMALL_TALK)

    def solve() -> Solution:
        yield Reply("No tool is needed.", answer, (), (answer,))

    return Task("chat", prompt, solve)


def repeat(rng: Random, world: World, split: Split) -> Task:
    """A text to be copied."""
    text = " ".join(
        lexicon.value(rng, split) if rng.random() < 0.4 else rng.choice(lexicon.WORDS)
        for _ in range(rng.randrange(2, 12))
    )
    prompt = rng.choice((f"Repeat: {text}", f"Say exactly this: {text}", f"Copy this text: {text}"))

    def solve() -> Solution:
        yield Reply("I copy the text.", text, (), (text,))

    return Task("copy", prompt, solve)


def remember(rng: Random, world: World, split: Split) -> Task:
    """The user tells something that is asked for later."""
    thing = f"{rng.choice(lexicon.WORDS)} {rng.choice(_THINGS)}"
    value = lexicon.value(rng, split)
    prompt = rng.choice(
        (
            f"Remember: the {thing} is {value}.",
            f"The {thing} is {value}. I will ask later.",
            f"My {thing} is {value}.",
        )
    )

    def solve() -> Solution:
        yield Reply(f"The {thing} is {value}.", "I will remember it.", (), ("remember",))

    return Task("remember", prompt, solve, told(thing, value))


def told(thing: str, value: str) -> Fact:
    """What can be asked for once the user told a thing."""
    return Fact(
        f"What is the {thing}?",
        f"The user said that the {thing} is {value}.",
        f"The {thing} is {value}.",
        value,
    )


def secret(rng: Random, world: World, split: Split) -> Task:
    """The assistant chooses a code and keeps it in its reasoning."""
    thing = f"{rng.choice(lexicon.WORDS)} {rng.choice(_SECRETS)}"
    value = lexicon.code(rng, split)

    def solve() -> Solution:
        yield Reply(f"I choose {value} as the {thing}.", "I have chosen one.", (), ("chosen",), is_free=True)

    return Task("secret", secret_prompt(thing), solve, secret_fact(thing, value))


def secret_prompt(thing: str) -> str:
    """Ask the assistant to choose a code."""
    return f"Choose a {thing} and keep it to yourself."


def secret_fact(thing: str, value: str) -> Fact:
    """What can be asked for once the assistant chose a code."""
    return Fact(
        f"Now tell me the {thing} that you chose.",
        f"I chose {value} as the {thing}.",
        f"The {thing} is {value}.",
        value,
        is_secret=True,
    )


def recall(fact: Fact) -> Task:
    """Ask for a fact of an earlier turn."""

    def solve() -> Solution:
        yield Reply(fact.reasoning, fact.answer, (), (fact.value,))

    return Task("recall", fact.question, solve)
