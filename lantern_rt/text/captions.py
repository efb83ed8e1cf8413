"""Cleaning of prompts, with the same steps as for the training captions of LlamaGen's text models.

The steps are copied from LlamaGen's text encoder wrapper, which copied them from PixArt and DeepFloyd IF. The steps
convert to lower case, remove links, markup, file names, product codes and CJK characters, and unify dashes and quotes.
As in LlamaGen, all steps are applied twice.
"""

from __future__ import annotations

import html
import re
from html.entities import html5
from html.parser import HTMLParser
from urllib.parse import unquote_plus

Replacements = tuple[tuple[str, str], ...]  # Pairs of pattern and replacement, in order of application.

_FILE_TYPES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DOMAINS = "com|co|ru|net|org|edu|gov|it"
_DASHES = (
    r"\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0"
    r"\ufe31\ufe32\ufe58\ufe63\uff0d"
)
_SYMBOLS = r"#\u00ae\u2022\u00a9\u2122&@\u00b7\u00ba\u00bd\u00be\u00bf\u00a1\u00a7~()\[\]{}|\\/*"


def _build_link_pattern(scheme: str) -> str:
    """Return a pattern of links: the text `scheme` with slashes, or a host name and a path without a following @."""
    return rf"\b(?:{scheme}:(?:/{{1,3}}|[a-z0-9%])|[a-z0-9.\-]+\.(?:{_DOMAINS})[\w/-]*\b/?(?!@))"


_LINKS: Replacements = (("<person>", "person"), (_build_link_pattern("https?"), ""), (_build_link_pattern("www"), ""))
_NOISE: Replacements = (
    (r"@\w+\b", ""),  # user names
    (r"[\u31c0-\u9fff]+", ""),  # CJK
    (f"[{_DASHES}]+", "-"),
    (r"[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    (r"[\u2018\u2019]", "'"),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"(?:\d{1,3}\.){3}\d{1,3}", " "),  # network addresses
    (r"\d:\d\d\s+$", ""),  # times at the end
    (r"\\n", " "),  # a line break that was written out
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.(?:{_FILE_TYPES})", ""),  # file names
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (f"[{_SYMBOLS}]+", " "),
    (r"\s+\.\s+", " "),
)
_MAX_JOINTS = 3  # With more hyphens and underscores, they are separators of words.
_CODES: Replacements = (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # product codes
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILE_TYPES})(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[x\u0445\u00d7]\d+\.?\d*\b", ""),  # sizes such as 3x4
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)


def clean_caption(text: str) -> str:
    """Clean a prompt in the way in which LlamaGen's training captions were cleaned. The result may be empty."""
    return _clean_once(_clean_once(text))


def _clean_once(text: str) -> str:
    from ftfy import fix_text  # The import takes 40 ms, which other prompts do not need.

    text = _apply_replacements(_LINKS, unquote_plus(text).strip().lower())
    text = _apply_replacements(_NOISE, _strip_markup(text))
    if len(re.findall("[-_]", text)) > _MAX_JOINTS:
        text = re.sub("[-_]", " ", text)
    text = html.unescape(html.unescape(fix_text(text))).strip()
    return _apply_replacements(_CODES, text).strip()


def _apply_replacements(replacements: Replacements, text: str) -> str:
    for pattern, replacement in replacements:
        text = re.sub(pattern, replacement, text)
    return text


class _VisibleTextParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)  # Otherwise a truncated last entity would be decoded.
        self.parts: list[str] = []
        self._hidden_tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "style", "template"):
            self._hidden_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._hidden_tags and tag == self._hidden_tags[-1]:
            self._hidden_tags.pop()

    def handle_data(self, data: str) -> None:
        if not self._hidden_tags:
            self.parts.append(data)

    def handle_entityref(self, name: str) -> None:
        self.handle_data(html5.get(f"{name};", f"&{name}"))

    def handle_charref(self, name: str) -> None:
        self.handle_data(html.unescape(f"&#{name};"))


def _strip_markup(text: str) -> str:
    if "<" not in text and "&" not in text:
        return text
    parser = _VisibleTextParser()
    parser.feed(text)
    parser.close()
    return "".join(parser.parts)
