"""Extract article prose from a MediaWiki dump. Each page is processed in these steps:

1. Skip redirects and pages whose title has a namespace ("Image:", "Wikipedia:", ...).
2. Decode XML entities, then HTML entities, so that markup written as entities is treated as markup.
3. Remove comments, <ref>, <math>, <gallery>, <timeline>, <nowiki>, <pre> and <code> with their content.
4. Remove templates {{...}}, tables {|...|}, [[Image:...]] and [[File:...]], including nested ones.
5. Remove [[Category:...]] and links to other languages; replace [[target|words]], [[words]] and [http://... words] by
   words; remove bare URLs.
6. Remove other tags but keep their content; remove bold and italic quote marks.
7. Put headings on lines of their own; remove list marks and lines without three letters in a row.
8. Cut the article at "References", "External links", "See also", "Further reading" or "Notes".
9. Skip articles that are then shorter than 400 bytes.
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
    """Return a normalized title for comparison: WikiText puts spaces around punctuation and writes `@-@` for a hyphen."""
    title = re.sub(r" ?@(.)@ ?", r"\1", html.unescape(title))
    return re.sub(r"[\W_]+", "", title).casefold()


def clean(markup: str) -> str:
    """Return the prose of one article's markup."""
    text = html.unescape(html.unescape(markup))
    text = _DROPPED.sub("", text)
    for pattern in (_TEMPLATE, _TABLE, _PICTURE):
        text = _repeated(pattern, "", text)
    text = _repeated(_LINK, r"\1", _CATEGORY.sub("", text))
    text = _ADDRESS.sub(lambda match: match[1] or "", text)
    text = _QUOTES.sub("", _TAG.sub("", text))
    text = _MARK.sub("", _HEADING.sub(r"\1", text))
    text = _ENDING.sub("", text)
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if _WORD.search(line)) + "\n"


def _repeated(pattern: re.Pattern[str], replacement: str, text: str) -> str:
    """Return a text with the pattern replaced until it no longer occurs, because it may be nested."""
    count = 1
    while count:
        text, count = pattern.subn(replacement, text)
    return text


def prose(
    dump: bytes, left_out_titles: set[str], progress: Callable[[str, float], None]
) -> tuple[list[tuple[str, bytes]], dict[str, int]]:
    """Return (title, text) of each article of the dump, and the number of pages skipped by reason."""
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
