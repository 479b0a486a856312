"""Parse layouts, which mechanism is in which layer: `standard*6`, `(kuramoto standard)*3`, `even(sharing:tie=kv)`.

    layout   = item (space item)*
    item     = unit ["*" count]
    unit     = composed | "(" layout ")" | name "(" composed ")"
    composed = term ("+" term)*
    term     = name [":" [variant ","] option "=" value ("," option "=" value)*] | path.py ":" Class [":" options]

A variant is a value of the option that selects others, such as the score function of `flex:softcap,cap=20`.
Values may be parenthesized and nested: `sharing:value_mix=(1,-1)`. Without a count a layout fills the model; with one it
must equal the model's number of layers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headtohead.common.errors import UserError, suggestion
from headtohead.common.text import check_plain
from headtohead.mechanisms.contract.registry import adopt, find_mechanism
from headtohead.mechanisms.contract.score import Score
from headtohead.mechanisms.contract.terms import Composed, Term, class_term, file_term, named_term


def _divisible(layers: int, by: int, name: str) -> int:
    if layers % by:
        raise UserError(
            f"layout {name}(...) needs a number of layers divisible by {by}; this size has {layers}"
        )
    return layers // by


# Layers, counted from 1, that stay standard. top, middle and bottom name the position of the *other* mechanism; the rest
# name the standard layers.
NAMED_LAYOUTS: dict[str, Callable[[int], set[int]]] = {
    "even": lambda n: set(range(2, n + 1, 2)),
    "odd": lambda n: set(range(1, n + 1, 2)),
    "top": lambda n: set(range(1, _divisible(n, 2, "top") + 1)),
    "middle": lambda n: set(range(1, _divisible(n, 4, "middle") + 1)) | set(range(3 * n // 4 + 1, n + 1)),
    "bottom": lambda n: set(range(_divisible(n, 2, "bottom") + 1, n + 1)),
    "quarter": lambda n: set(range(4, 4 * _divisible(n, 4, "quarter") + 1, 4)),
    "first": lambda n: {1},
    "last": lambda n: {n},
    "bilateral": lambda n: {1, n},
}


@dataclass(frozen=True)
class Layout:
    """A pattern of mechanisms for any number of layers."""

    text: str
    pattern: tuple[Composed, ...]
    """The repeated pattern; for a named layout, the one mechanism that is not standard."""
    named: str = ""
    counted: bool = False
    """Whether a count was given, so that the pattern must equal the layers exactly."""

    def layers(self, count: int) -> list[Composed]:
        """Return the mechanism of each of `count` layers."""
        if self.named:
            standard = Composed((named_term("standard", {}),))
            kept = NAMED_LAYOUTS[self.named](count)
            return [standard if layer in kept else self.pattern[0] for layer in range(1, count + 1)]
        length = len(self.pattern)
        if self.counted and length != count:
            raise UserError(f"layout '{self.text}' has {length} layers; this size has {count}")
        if count % length:
            raise UserError(f"layout '{self.text}' repeats every {length} layers; it cannot fill {count}")
        return list(self.pattern) * (count // length)

    @property
    def label(self) -> str:
        """The short display label."""
        if self.named:
            return f"{self.named}({self.pattern[0].label})"
        if len(set(self.pattern)) == 1:
            return self.pattern[0].label
        return " / ".join(composed.label for composed in self.pattern)

    @property
    def identity(self) -> list[list[dict[str, Any]]]:
        """Everything in the pattern that can change a result."""
        return [composed.as_dict() for composed in self.pattern]

    @property
    def portable(self) -> bool:
        """Whether another process can build this from its text alone."""
        return all(composed.portable for composed in self.pattern)


def parse_layout(given: str | type | Score | Any) -> Layout:
    """Return the layout of an arm given as text, or of a mechanism class or score function passed in Python."""
    if isinstance(given, type | Score):
        composed = Composed((class_term(given),))
        return Layout(composed.text, (composed,))
    if inspect.isfunction(given):
        adopt(given, given.__name__, "the given arms")
    if not isinstance(given, str):
        raise UserError(f"an arm is a string, a class or a score function; got a {type(given).__name__}")
    return _Parser(check_plain(given, "an arm")).whole()


_MAX_LAYERS = 10_000
_DEEPEST = 20


def skipped_layers(layers: Sequence[Composed], text: str) -> list[int]:
    """Return the layers, counted from 1, named by `variant`, `standard` or a list such as `2,4-6`."""
    count = len(layers)
    if text in ("variant", "standard"):
        standard = [find_mechanism("standard")]
        usual = [[term.kind for term in composed.terms] == standard for composed in layers]
        chosen = [place for place, kind in enumerate(usual, 1) if kind == (text == "standard")]
        if not chosen:
            which = "no layer" if text == "standard" else "every layer"
            raise UserError(f"skip={text}: {which} of this model is standard")
        return chosen
    places: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        if not match:
            close = suggestion(text, ("variant", "standard"))
            raise UserError(f"skip takes variant, standard or layers such as 2,4-6, got '{text}'{close}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= count:
            raise UserError(f"skip={text}: '{part.strip()}' is not a layer from 1 to {count}")
        places |= set(range(first, last + 1))
    return sorted(places)


class _Parser:
    """Parses one arm from left to right; every error gives the position."""

    def __init__(self, text: str) -> None:
        self.text, self.place, self.depth = text, 0, 0

    def whole(self) -> Layout:
        if not self.text.strip():
            raise UserError("empty arm; give a mechanism's name such as 'standard'")
        layout = self.layout()
        if self.next:
            raise self.error("unexpected text")
        return layout

    def layout(self) -> Layout:
        pattern: list[Composed] = []
        counted, named = False, ""
        while self.next not in ("", ")"):
            part = self.item()
            self.take(r"\s*")
            if part.named and (pattern or self.next not in ("", ")")):
                raise self.error(f"{part.named}(...) fills the whole model; nothing can be added to it")
            pattern += part.pattern
            counted, named = counted or part.counted, part.named
        if not pattern:
            raise self.error("a mechanism is missing")
        return Layout(self.text.strip(), tuple(pattern), named, counted)

    def item(self) -> Layout:
        part = self.unit()
        if not self.take(r"\*"):
            self.separated("after ')' comes a space, a count such as '*3', or the end", ")")
            return part
        count = self.take(r"[0-9]+", "a count after '*'")
        self.separated("a count has digits only; after it comes a space or the end", count)
        if part.named:
            raise self.error(f"{part.named}(...) fills the whole model and takes no count")
        if len(count) > 5 or not 1 <= int(count) * len(part.pattern) <= _MAX_LAYERS:
            raise self.error(f"count {count[:8]} must give between 1 and {_MAX_LAYERS:,} layers")
        return Layout(self.text, part.pattern * int(count), counted=True)

    def separated(self, reason: str, after: str) -> None:
        """Raise an error if other text than a space or `)` follows directly after this one."""
        if self.text[: self.place].endswith(after) and re.match(r"[^\s)]", self.next):
            raise self.error(reason)

    def unit(self) -> Layout:
        self.take(r"\s*")
        if self.take(r"\("):
            self.depth += 1
            if self.depth > _DEEPEST:
                raise self.error("parentheses nest too deep")
            inner = self.layout()
            self.depth -= 1
            if inner.named:
                raise self.error(f"{inner.named}(...) fills the whole model and cannot be in a group")
        elif name := self.take(r"[A-Za-z_]+\(").removesuffix("("):
            if name not in NAMED_LAYOUTS:
                self.place -= len(name) + 1
                raise self.error(f"unknown layout '{name}'{suggestion(name, NAMED_LAYOUTS)}")
            inner = Layout(self.text, (self.composed(),), named=name)
        else:
            return Layout(self.text, (self.composed(),))
        self.take(r"\s*\)", "')'")
        return inner

    def composed(self) -> Composed:
        terms = [self.term()]
        while self.take(r"\+"):
            terms.append(self.term())
        return Composed(tuple(terms))

    def term(self) -> Term:
        self.take(r"\s*")
        if path := self.take(r"[^\s*+()=]+\.py(?![^\s:*+()])"):
            # A name after the colon is a class, unless an equals sign makes it an option of the file's only mechanism.
            class_name = self.take(r":[A-Za-z_]\w*\b(?!\s*=)").removeprefix(":")
            return file_term(path, class_name, self.options(after="[:,]" if class_name else ":"))
        name = self.take(r"[^\s:*+()=,]+", "a mechanism's name")
        if re.search(r"[./\\]", name):
            self.place -= len(name)
            raise self.error("a file's path ends in .py and has no spaces and none of * + ( ) =")
        rest = re.compile(r"=[^\s+*()]*|").match(self.text, self.place)
        kind = find_mechanism(name, rest[0] if rest else "")
        return named_term(name, self.options(kind.Options))

    def options(self, known: type | None = None, after: str = ":") -> dict[str, str]:
        options: dict[str, str] = {}
        more = self.take(after)
        selector = getattr(known, "selector", "")
        if more and selector and (variant := self.take(r"[A-Za-z_]\w*\b(?!\s*=)")):
            options[selector] = variant
            more = self.take(",")
        while more:
            name = self.take(r"[A-Za-z_]\w*", "an option's name")
            self.take(r"\s*=", "'='")
            if name in options:
                raise self.error(f"option '{name}' is given twice")
            options[name] = self.value()
            more = self.take(",")
        return options

    def value(self) -> str:
        start, depth = self.place, 0
        while self.next and (depth or not (self.next in ",*+)" or self.next.isspace())):
            depth += (self.next == "(") - (self.next == ")")
            self.place += 1
        if depth:
            raise self.error("a parenthesis is not closed")
        if start == self.place:
            raise self.error("a value is missing")
        return self.text[start : self.place]

    @property
    def next(self) -> str:
        """The next character, empty at the end."""
        return self.text[self.place : self.place + 1]

    def take(self, pattern: str, wanted: str = "") -> str:
        """Return the text here that matches, and move after it; without a match raise what is `wanted`, if given."""
        found = re.compile(pattern).match(self.text, self.place)
        if found:
            self.place = found.end()
            return found[0]
        if wanted:
            raise self.error(f"{wanted} is missing")
        return ""

    def error(self, reason: str) -> UserError:
        rest = self.text[self.place : self.place + 20]
        where = f"before '{rest}'" if rest else "at its end"
        return UserError(f"arm '{self.text}': {reason}, {where}")
