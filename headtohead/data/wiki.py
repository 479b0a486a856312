"""Article prose out of a MediaWiki dump. The rule, in the order it is applied to each page:

1. Pages that are redirects, or whose title has a namespace ("Image:", "Wikipedia:", ...), are left out.
2. XML entities are decoded, then HTML entities, so that markup written as entities is seen as markup.
3. Comments, <ref>, <math>, <gallery>, <timeline>, <nowiki>, <pre> and <code> go with their content.
4. Templates {{...}} and tables {|...|} go, nested ones with them; so do [[Image:...]] and [[File:...]].
5. [[Category:...]] and links to other languages go; [[target|words]] becomes words, [[words]] stays words;
   [http://... words] becomes words, bare addresses go.
6. Other tags go and their content stays; quote marks that mean bold and italic go.
7. Headings become lines of their own; list marks go; lines without three letters in a row go.
8. "References", "External links", "See also", "Further reading" and "Notes" end the article.
9. What is shorter than 400 bytes afterwards is left out.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable

RULE = "prose-1"

_PAGE = re.compile(rb"<title>(.*?)</title>.*?<text[^>]*>(.*?)(?:</text>|\Z)", re.DOTALL)
_NAMESPACE = re.compile(r"^[A-Za-z ]+:(?! )")
_DROPPED = re.compile(
    r"<!--.*?-->|<ref[^>/]*/>|<(ref|math|gallery|timeline|nowiki|pre|code)\b[^>]*>.*?</\1\s*>",
    re.DOTALL | re.IGNORECASE,
)
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_TABLE = re.compile(r"\{\|(?:(?!\{\|).)*?\|\}", re.DOTALL)
_PICTURE = re.compile(
    r"\[\[(?:Image|File|Media):(?:[^\[\]]|\[\[[^\[\]]*\]\]|\[[^\[\]]*\])*\]\]", re.IGNORECASE
)
_CATEGORY = re.compile(r"\[\[:?(?:Category|[a-z]{2,3}(?:-[a-z]+)*|simple):[^\[\]]*\]\]", re.IGNORECASE)
_LINK = re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]")
_ADDRESS = re.compile(r"\[(?:https?|ftp|mailto)[^\s\]]*\s*([^\]]*)\]|(?:https?|ftp)://\S+")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_QUOTES = re.compile(r"'{2,5}")
_HEADING = re.compile(r"^=+\s*(.*?)\s*=+\s*$", re.MULTILINE)
_ENDING = re.compile(
    r"^(?:References|External links?|See also|Further reading|Notes|Bibliography|Links)\s*$.*",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)
_MARK = re.compile(r"^[*#:;]+\s*", re.MULTILINE)
_WORD = re.compile(r"[^\W\d_]{3}")
_SHORTEST = 400


def plain_title(title: str) -> str:
    """Return a title fit for comparing: WikiText writes spaces round punctuation and `@-@` for a hyphen."""
    title = re.sub(r" ?@(.)@ ?", r"\1", html.unescape(title))
    return re.sub(r"[\W_]+", "", title).casefold()


def clean(markup: str) -> str:
    """Return the prose of one article's markup."""
    text = html.unescape(html.unescape(markup))
    text = _DROPPED.sub("", text)
    for pattern in (_TEMPLATE, _TABLE, _PICTURE):
        while True:
            text, count = pattern.subn("", text)
            if not count:
                break
    text = _CATEGORY.sub("", text)
    while True:
        text, count = _LINK.subn(r"\1", text)
        if not count:
            break
    text = _ADDRESS.sub(lambda match: match[1] or "", text)
    text = _QUOTES.sub("", _TAG.sub("", text))
    text = _MARK.sub("", _HEADING.sub(r"\1", text))
    text = _ENDING.sub("", text)
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if _WORD.search(line)) + "\n"


def prose(
    dump: bytes, left_out_titles: set[str], progress: Callable[[str, float], None]
) -> tuple[list[tuple[str, bytes]], dict[str, int]]:
    """Return (title, text) of each article of the dump, and how many pages were left out for which reason."""
    articles: list[tuple[str, bytes]] = []
    counts = {"articles": 0, "redirects": 0, "namespaces": 0, "in WikiText valid or test": 0, "too short": 0}
    for number, match in enumerate(_PAGE.finditer(dump)):
        if number % 200 == 0:
            progress("cleaning articles", match.start() / len(dump))
        title = html.unescape(match[1].decode("utf-8", "replace"))
        markup = match[2].decode("utf-8", "replace")
        if markup[:20].lstrip().lower().startswith("#redirect"):
            counts["redirects"] += 1
        elif _NAMESPACE.match(title):
            counts["namespaces"] += 1
        elif plain_title(title) in left_out_titles:
            counts["in WikiText valid or test"] += 1
        elif len(text := f"{title}\n{clean(markup)}".encode()) < _SHORTEST:
            counts["too short"] += 1
        else:
            counts["articles"] += 1
            articles.append((title, text))
    return articles, counts
