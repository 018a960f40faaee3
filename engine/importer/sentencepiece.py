"""SentencePiece's BPE has no merge list: it joins the neighbours whose union has the best score.

Kudo and Richardson, "SentencePiece" (2018), section 3.1; a list ordered by the union's score does the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferd.engine.importer.vocabulary import TokenKind, Vocabulary

SPACE = "\u2581"


def merges_from_scores(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a normal token out of two, best first; equal scores in the order of ids."""
    ids = {
        text: token_id
        for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind is TokenKind.NORMAL
    }
    ranked: list[tuple[float, int, int, int]] = []
    for text, token_id in ids.items():
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], token_id, left, right))
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, _, left, right in sorted(ranked)]
