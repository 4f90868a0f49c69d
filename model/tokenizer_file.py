"""tokenizer.json, read with errors that name the key at fault.

The library reports only a line and column of what is often a single line of megabytes. Where it refuses a file, the
parts are tried one by one, each in an otherwise empty tokenizer, to find the one that it refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

_EMPTY: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}
# what a section of type Sequence calls its parts
_PARTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


class TokenizerFileError(ValueError):
    """A tokenizer.json that cannot be used; the message begins with the key."""


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Raises OSError, or TokenizerFileError such as "model.merges[3]: 'zz' is not in the vocabulary"."""
    content = path.read_bytes()
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library panics on some files, and that is not an Exception
        raise TokenizerFileError(_fault(content) or " ".join(str(error).split())) from error


def _fault(content: bytes) -> str | None:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        return "model: missing or not an object"
    for key, value in document.items():
        if key == "model":
            reason = next(_model_faults(value), None) or _refusal({"model": value}, "model")
        else:
            reason = next(_part_faults(key, value), None) or _refusal({key: value}, key)
        if reason:
            return reason
    return None


def _refusal(change: Mapping[str, Any], name: str) -> str | None:
    """What the library says of an empty tokenizer with this change."""
    try:
        tokenizers.Tokenizer.from_str(json.dumps({**_EMPTY, **change}))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = str(error).split(" at line ")[0]  # of a text that nobody has seen
        return f"{name}: {'not a known form' if 'untagged enum' in reason else reason}"
    return None


def _part_faults(key: str, value: Any) -> Iterator[str]:
    """Faults in the items of a list, or in the parts of a Sequence."""
    if key == "added_tokens" and isinstance(value, list):
        reasons = (_refusal({key: [item]}, f"{key}[{at}]") for at, item in enumerate(value))
        yield from (reason for reason in reasons if reason)
    name = _PARTS.get(key)
    if name and isinstance(value, dict) and isinstance(value.get(name), list):
        reasons = (_refusal({key: item}, f"{key}.{name}[{at}]") for at, item in enumerate(value[name]))
        yield from (reason for reason in reasons if reason)


def _model_faults(model: Mapping[str, Any]) -> Iterator[str]:
    vocab, merges = model.get("vocab"), model.get("merges", [])
    if model.get("type", "BPE") != "BPE":
        return
    if not isinstance(vocab, dict):
        yield "model.vocab: missing or not an object"
        return
    for token, id in vocab.items():
        if type(id) is not int or not 0 <= id < 2**32:
            yield f"model.vocab[{token!r}]: {id!r} is not a token id"
    for at, merge in enumerate(merges if isinstance(merges, list) else []):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            yield f"model.merges[{at}]: {merge!r:.80} is not a pair of tokens"
        elif missing := [token for token in (*pair, "".join(pair)) if token not in vocab]:
            yield f"model.merges[{at}]: {missing[0]!r} is not in the vocabulary"
    for key, value in model.items():
        if key not in ("type", "vocab", "merges"):
            reason = _refusal({"model": _EMPTY["model"] | {key: value}}, f"model.{key}")
            if reason:
                yield reason
