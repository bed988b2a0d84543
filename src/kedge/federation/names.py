"""Names and reasons that somebody else wrote: as plain text, and compared by how they look."""

from __future__ import annotations

import unicodedata

#: Letters of other scripts, and signs, that look like the ones below them.
_OTHER = (
    "АВЕЅІЈКМНОРСТУХҮԌԚԜӀавеѕіјкмнорстухүһԁԛԝӏ"  # Cyrillic
    "ΑΒΕΖΗΙΚΜΝΟΡΤΥΧϹαιοκνρυχϲ"  # Greek
    "ՕՍօսոհᎪᏴᏟᎬᎻᏀᎫᏦᏞᎷᏢᎡᏚᎢᏙᎳᏃꓮꓐꓚꓓꓰꓝꓖꓧꓲꓙꓗꓡꓟꓠꓳꓑꓣꓢꓔꓴꓦꓪꓫꓬꓜ"  # Armenian, Cherokee, Lisu
    "ıȷɑɡɩʏᴀᴄᴇɪᴊᴋᴍɴᴏᴘᴛᴜᴠᴡᴢ‐‑‒–—―−’‘ʼ′⁄∕"
)
_PLAIN = (
    "ABESIJKMHOPCTYXYGQWIabesijkmhopctyxyhdqwi"
    "ABEZHIKMNOPTYXCaiokvpuxc"
    "OUounhABCEHGJKLMPRSTVWZABCDEFGHIJKLMNOPRSTUVWXYZ"
    "ijagiyaceijkmnoptuvwz-------''''//"
)
_LETTERS = str.maketrans(_OTHER, _PLAIN)
#: Signs without a shape that Unicode does not count as such, and one that is a space.
_NOTHING = dict.fromkeys(map(ord, "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")) | {0x2800: " "}


def look(name: str, case: bool = False) -> str:
    """The same text for names that look alike: in other scripts, with signs that nobody sees, more
    spaces, or in other widths; and, unless ``case``, in capitals.

    >>> look("North "), look("n\u043erth"), look("no\u200brth")
    ('north', 'north', 'north')
    """
    text = unicodedata.normalize("NFKC", name.translate(_NOTHING)).translate(_LETTERS)
    seen = (_seen(sign) for sign in text)
    text = " ".join("".join(seen).split())
    return text if case else unicodedata.normalize("NFKC", text.casefold()).translate(_LETTERS)


def _seen(sign: str) -> str:
    if unicodedata.category(sign) == "Cf" or 0xFE00 <= ord(sign) <= 0xFE0F:
        return ""
    return str(unicodedata.decimal(sign, sign))


def plain(text: str) -> str:
    r"""Text in one line, without signs that a terminal obeys or that turn lines around.

    >>> plain("a\nb\x1b[2J")
    'a\\nb\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
