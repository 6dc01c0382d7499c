"""Where bases come from that are no published checkpoint, or no plain one, by fingerprint: a name does not tell."""

from __future__ import annotations

HISTORIES = {
    "97c852902e24": "Google's BERT-tiny, fine-tuned as a question classifier, then trained further on masked words",
    "048cefd48662": "Google's BERT-mini, fine-tuned as a reranker, its matrices restored from 8 bits",
    "301935cee49b": "DistilBERT-base-cased, fine-tuned as a grammar tagger, its matrices restored from 8 bits",
    "f5e54f6afb13": "MiniLM with 6 layers, trained further for sentence embeddings",
    "918705d90d67": "MiniLM with 3 layers, trained further for sentence embeddings",
    "9548d4fafb22": "E5 with 12 layers, trained for sentence embeddings",
}
DIGITS = 12  # of a fingerprint, as in a manifest


def history(fingerprint: str) -> str:
    """What a base is and what was done to it; empty if that is not known."""
    return HISTORIES.get(fingerprint[:DIGITS], "")
